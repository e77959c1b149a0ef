"""What TensorRT tells while it builds: its errors, and how far it is.

The classes are made here, inside functions, because their bases exist only where TensorRT is installed.
"""

from collections.abc import Callable
from typing import Any

Progress = Callable[[str, int, int], None]  # phase, steps done, steps in all


def collecting_logger(trt: Any) -> Any:
    """A logger that keeps the errors; ``said()`` tells them in one line."""

    class CollectingLogger(trt.ILogger):  # type: ignore[misc]  # the base exists only where TensorRT is installed
        def __init__(self) -> None:
            super().__init__()
            self.errors: list[str] = []

        def log(self, severity: Any, message: str) -> None:
            if severity in (trt.ILogger.INTERNAL_ERROR, trt.ILogger.ERROR):
                self.errors.append(message)

        def said(self) -> str:
            said = "; ".join(self.errors) or "the compiler gave no reason"
            if "dedicated kernel" in said:
                said += " (attention compiles in float16 and bfloat16, for head sizes that have a kernel)"
            return said

    return CollectingLogger()


def progress_monitor(trt: Any, progress: Progress) -> Any:
    """A monitor that hands every step of every phase to ``progress``."""

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
