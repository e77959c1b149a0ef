"""Draw the pictures of the documents: ``python -m tools.pictures`` writes docs/pictures/*.svg.

The figures come from docs/data/*.csv. ``trace.json`` is what ``tools.pictures.trace`` read of the page that
``tandemrt run`` wrote of the README's order with ``--budget 20``.
"""

import json
from pathlib import Path

from tools.pictures.drawn import PICTURES
from tools.pictures.trace import trace

HERE = Path(__file__).parent
FOLDER = HERE.parents[1] / "docs" / "pictures"


def drawn() -> dict[str, str]:
    """Return every picture by its name."""
    tokens = json.loads((HERE / "trace.json").read_text())
    return {name: draw() for name, draw in PICTURES.items()} | {"trace": trace(tokens)}


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, picture in drawn().items():
        (FOLDER / f"{name}.svg").write_text(picture)
