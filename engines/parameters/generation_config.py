"""Default sampling parameters from a checkpoint's generation_config.json."""

import json
from pathlib import Path
from typing import Any

from tandemrt.engines.contract.sampling_parameters import FILTERS
from tandemrt.engines.parameters.sampling import SamplingParams
from tandemrt.engines.validation.errors import BadBundle, BadRequest, clipped

FILE_NAME = "generation_config.json"
# Names of transformers -> names of SamplingParams, as in vLLM. The build reads the stop tokens.
_NAMES = {
    **{name: name for name in ("temperature", *FILTERS, "repetition_penalty")},
    "max_new_tokens": "max_tokens",
}


def recommended(folder: Path) -> dict[str, Any]:
    """Return the sampling parameters in ``folder``'s file, by the names of ``SamplingParams``.

    Raises BadBundle for a value that ``SamplingParams`` rejects.
    """
    path = folder / FILE_NAME
    if not path.is_file():
        return {}
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        parameters = {parameter: data[name] for name, parameter in _NAMES.items() if data.get(name) is not None}
        SamplingParams(**parameters)
    except (BadRequest, ValueError, AttributeError, RecursionError) as error:
        raise BadBundle(
            f"{FILE_NAME}: its sampling parameters must be valid in a request: {clipped(error)}; correct "
            "it in the checkpoint, or open the bundle with generation_config=False"
        ) from error
    return parameters
