"""The code blocks of the pages that a new user reads, and the commands in them."""

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", "docs/index.md", "docs/guide.md", "docs/openai.md", "docs/structured.md")


@dataclass(frozen=True)
class Block:
    """A fenced block. ``language`` is "" for commands of a shell, "text" for what a command prints."""

    page: str
    language: str
    text: str

    @property
    def commands(self) -> list[str]:
        """The commands of a shell block, without comments."""
        lines = [re.sub(r"(^|\s+)# .*", "", line) for line in self.text.splitlines()]
        return [line for line in lines if line] if self.language == "" else []


def blocks_of(page: str) -> list[Block]:
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)
    return [Block(page, language, text) for language, text in fenced]


BLOCKS = [block for page in PAGES for block in blocks_of(page)]


def block(page: str, language: str, beginning: str) -> Block:
    """Return the only block of ``page`` whose text begins so."""
    [only] = [each for each in blocks_of(page) if each.language == language and each.text.startswith(beginning)]
    return only
