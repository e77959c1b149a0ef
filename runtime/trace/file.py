"""Write a trace to one self-contained file: an HTML page or a Chrome trace (.json)."""

import json
import os
from pathlib import Path

from tokenizers import Tokenizer

from tandemrt.engines.validation.errors import BadRequest, clipped
from tandemrt.runtime.trace.chrome import chrome_trace
from tandemrt.runtime.trace.data import page_data
from tandemrt.runtime.trace.pages import self_contained
from tandemrt.runtime.trace.recorder import Recorder

_PAGE = Path(__file__).with_name("page.html")
_PLACEHOLDER = "{}"  # the content of the page's first script, replaced by the data


def trace_file(path: str | Path) -> Path:
    """Return ``path`` of a trace. Raises BadRequest unless it ends with .html or .json and can be written."""
    file = Path(path)
    if file.suffix not in (".html", ".json"):
        raise BadRequest(
            f"trace: must end with .html (a page) or .json (a Chrome trace), received {clipped(path)}; "
            "name another file"
        )
    if file.is_dir() or not os.access(file if file.exists() else file.parent, os.W_OK):
        raise BadRequest(f"trace: must be a file that can be written, received {clipped(path)}; name another file")
    return file


def write_trace(path: Path, recorder: Recorder, tokenizer: Tokenizer, bundle: str) -> None:
    """Write the requests in ``recorder`` to ``path``. ``bundle``: the bundle's name, for headings."""
    if path.suffix == ".json":
        path.write_text(json.dumps(chrome_trace(recorder, tokenizer, bundle)), encoding="utf-8")
        return
    data = json.dumps(page_data(recorder, tokenizer, bundle)).replace("<", "\\u003c")  # a text may contain </script>
    page = self_contained(_PAGE)
    path.write_text(page.replace(f">{_PLACEHOLDER}</script>", f">{data}</script>", 1), encoding="utf-8")
