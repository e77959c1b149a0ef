"""Pages of one file: what pages share, styles, scripts and a head, is inserted, so that no page asks a network."""

import re
from pathlib import Path

_HERE = Path(__file__).parent
_INSERTED = re.compile(r"/\* (\w+\.(?:css|js)) \*/|<!-- (\w+\.html) -->\n")


def self_contained(page: Path) -> str:
    """Return the HTML of ``page`` with files in the places of their names: those of its folder, or of this one."""

    def content(name: re.Match[str]) -> str:
        own = page.with_name(name[1] or name[2])
        return (own if own.exists() else _HERE / own.name).read_text(encoding="utf-8")

    return _INSERTED.sub(content, page.read_text(encoding="utf-8"))
