"""Default sampling parameters: those that a checkpoint recommends in its generation_config.json."""

import json
from pathlib import Path
from typing import Any

from tandemrt.engines.errors import BadBundle, BadRequest, clipped
from tandemrt.engines.params import SamplingParams

FILE_NAME = "generation_config.json"
# transformers' names and ours, the ones that vLLM takes. Which tokens end a text is read when the bundle is built.
_NAMES = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}


def recommended(folder: Path) -> dict[str, Any]:
    """The sampling parameters that the file in ``folder`` gives, under the names of ``SamplingParams``.

    Raises BadBundle for a value that ``SamplingParams`` refuses.
    """
    path = folder / FILE_NAME
    if not path.is_file():
        return {}
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        given = {ours: data[name] for name, ours in _NAMES.items() if data.get(name) is not None}
        SamplingParams(**given)
    except (BadRequest, ValueError, AttributeError, RecursionError) as error:
        raise BadBundle(
            f"{FILE_NAME}: its sampling parameters must be those that a request may ask for: {clipped(error)}; correct "
            "it in the checkpoint, or open the bundle with generation_config=False"
        ) from error
    return given
