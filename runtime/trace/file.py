"""Where a trace goes: a page (.html) or a Chrome trace (.json), one file that needs nothing else."""

import json
import os
from pathlib import Path

from tokenizers import Tokenizer

from tandemrt.engines.errors import BadRequest, clipped
from tandemrt.runtime.trace.chrome import chrome_trace
from tandemrt.runtime.trace.data import page_data
from tandemrt.runtime.trace.recorder import Recorder

_PAGE = Path(__file__).with_name("page.html")
_PLACE = "{}"  # of the data, alone between the tags of the page's first script


def trace_file(path: str | Path) -> Path:
    """Return the place of a trace. Raises BadRequest unless it ends with .html or .json and can be written."""
    place = Path(path)
    if place.suffix not in (".html", ".json"):
        raise BadRequest(
            f"trace: must end with .html (a page) or .json (a Chrome trace), received {clipped(path)}; "
            "name another file"
        )
    if place.is_dir() or not os.access(place if place.exists() else place.parent, os.W_OK):
        raise BadRequest(f"trace: must be a file that can be written, received {clipped(path)}; name another file")
    return place


def write_trace(place: Path, recorder: Recorder, tokenizer: Tokenizer, bundle: str) -> None:
    """Write what ``recorder`` has of the ``bundle`` of that name to ``place``."""
    if place.suffix == ".json":
        place.write_text(json.dumps(chrome_trace(recorder, tokenizer, bundle)), encoding="utf-8")
        return
    data = json.dumps(page_data(recorder, tokenizer, bundle)).replace("<", "\\u003c")  # a text may spell </script>
    page = _PAGE.read_text(encoding="utf-8")
    place.write_text(page.replace(f">{_PLACE}</script>", f">{data}</script>", 1), encoding="utf-8")
