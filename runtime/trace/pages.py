"""Pages of one file: the style and the script that our pages share are inserted, so that no page asks a network."""

from pathlib import Path

_HERE = Path(__file__).parent


def self_contained(page: Path) -> str:
    """Return the HTML of ``page`` with style.css and shared.js in the places of their names."""
    text = page.read_text(encoding="utf-8")
    for name in ("style.css", "shared.js"):
        text = text.replace(f"/* {name} */", (_HERE / name).read_text(encoding="utf-8"), 1)
    return text
