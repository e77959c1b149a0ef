"""Progress monitor for TensorRT builds.

The class is made inside a function, because its base class exists only where TensorRT is installed.
"""

from typing import Any

from tandemrt.engines.options.build_listener import Progress


def progress_monitor(trt: Any, progress: Progress) -> Any:
    """Return a monitor that passes every step of every phase to ``progress``."""

    class ProgressMonitor(trt.IProgressMonitor):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.steps: dict[str, int] = {}

        def phase_start(self, phase: str, parent: str | None, steps: int) -> None:  # noqa: ARG002 - TensorRT's signature
            self.steps[phase] = steps
            progress(phase, 0, steps)

        def step_complete(self, phase: str, step: int) -> bool:
            progress(phase, step + 1, self.steps[phase])
            return True

        def phase_finish(self, phase: str) -> None:
            progress(phase, self.steps[phase], self.steps[phase])

    return ProgressMonitor()
