"""The text of a trace, token by token; ``python -m tools.pictures.trace out.html`` takes the first one of a page."""

import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tools.pictures.svg import WIDTH, box, picture, text

_LEGEND = {
    "accepted": ("c0", "drafted and accepted"),
    "bonus": ("c2", "bonus"),
    "corrected": ("c1", "corrected"),
    "budget": ("c4", "forced by the budget"),
    "grammar": ("c3", "by the grammar"),
}
_CHARACTER, _LINE, _LEFT = 8.0, 30.0, 10.0


def trace(tokens: Sequence[Mapping[str, Any]]) -> str:
    """Draw the tokens of a text, each with the colour of where it came from."""
    parts = [text(10, 24, "Every token, and where it came from", "ink title")]
    x, y = 10.0, 46.0
    for classes, words in _LEGEND.values():
        width = 26 + 6.3 * len(words)
        if x + width > WIDTH:
            x, y = 10.0, y + 18
        parts += [box(x, y - 9, 12, 5, classes), text(x + 16, y, words, "faint small")]
        x += width
    x, y = _LEFT, y + 32
    for token in tokens:
        words = str(token["text"])
        shown = words.replace("\n", "↵")
        width = _CHARACTER * len(shown)
        if x + width > WIDTH - 6:
            x, y = _LEFT, y + _LINE
        classes, about = _LEGEND[token["source"]]
        parts += [box(x, y + 5, width - 1.5, 5, classes, f"{shown}: {about}"), _code(x, y, shown, width)]
        x += width
        if words.endswith("\n"):
            x, y = _LEFT, y + _LINE
    return picture(y + 22, "A text of the demo, every token underlined by where it came from", parts)


def _code(x: float, y: float, words: str, width: float) -> str:
    # In the width that it was given, whatever font a reader has.
    fixed = f'class="code" textLength="{width - 1.5:g}" lengthAdjust="spacingAndGlyphs" xml:space="preserve"'
    return text(x, y, words).replace('class="ink"', fixed)


def read(page: Path) -> list[dict[str, Any]]:
    """Return the tokens of the first request of a page that ``tandemrt run --trace`` wrote: text and source."""
    data = re.search(r'id="data">(.*?)</script>', page.read_text(encoding="utf-8"))
    if data is None:
        raise SystemExit(f"{page}: is no page of a trace")
    tokens = json.loads(data[1])["requests"][0]["tokens"]
    return [{"text": token["text"], "source": token["source"]} for token in tokens]


if __name__ == "__main__":
    rows = ",\n".join(json.dumps(token, ensure_ascii=False) for token in read(Path(sys.argv[1])))
    print(f"[\n{rows}\n]")
