"""A listener that records what a build reports."""

from tandemrt.engines.options.build_listener import BuildListener


class Recorded(BuildListener):
    """``titles`` of steps, and ``details`` within them: unit, number done, total number."""

    def __init__(self) -> None:
        self.titles: list[str] = []
        self.details: list[tuple[str, int, int]] = []

    def begin(self, title: str) -> None:
        self.titles.append(title)

    def detail(self, unit: str, done: int, total: int) -> None:
        self.details.append((unit, done, total))
