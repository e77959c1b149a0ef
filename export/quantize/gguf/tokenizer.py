"""Write the tokenizer that the vocabulary of a GGUF file defines."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tandemrt.engines.validation.errors import BackendUnavailable, BadCheckpoint, clipped, quoted
from tandemrt.engines.validation.extras import pip_install
from tandemrt.export.quantize.gguf.byte_level import is_byte_level, unknown_split, write_byte_level

_USER_DEFINED = 4  # a type of tokens: text that sentencepiece finds before it merges anything


def write_tokenizer(file: Path, metadata: Mapping[str, Any], folder: Path) -> None:
    """Write the tokenizer of ``file``, which has ``metadata``, into ``folder``. Raises BadCheckpoint.

    transformers converts what ``write_byte_level`` does not. Files do not state the order of Gemma's merges, which this
    function adds.
    """
    try:
        if is_byte_level(metadata):
            write_byte_level(metadata, folder)
            return
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise BadCheckpoint(f"{file}: its tokenizer is damaged: {clipped(error)}; download it again") from error
    if (unknown := unknown_split(metadata)) is not None:
        raise BadCheckpoint(
            f"{file}: tokenizer.ggml.pre is {quoted(unknown)}, whose way to split texts is not known; take the "
            "original checkpoint"
        )
    try:
        from transformers import PreTrainedTokenizerFast
    except ModuleNotFoundError as error:
        raise BackendUnavailable(f"the tokenizer of a GGUF file needs transformers: {pip_install('gguf')}") from error
    try:
        # AutoTokenizer would read the metadata twice, to choose a class.
        tokenizer = PreTrainedTokenizerFast.from_pretrained(str(file.parent), gguf_file=file.name)
        tokenizer.save_pretrained(folder)
    except Exception as error:
        raise BadCheckpoint(f"{file}: transformers cannot read the tokenizer: {clipped(error)}") from error
    if str(metadata["general.architecture"]).startswith("gemma") and "tokenizer.ggml.scores" in metadata:
        path = folder / "tokenizer.json"
        stored = json.loads(path.read_text(encoding="utf-8"))
        stored["model"]["merges"] = _sorted_merges(stored["model"], metadata)
        path.write_text(json.dumps(stored, ensure_ascii=False), encoding="utf-8")


def _sorted_merges(model: dict[str, Any], metadata: Mapping[str, Any]) -> list[list[str]]:
    """Return merges by the scores of their results, as sentencepiece merges; those of user-defined tokens come first.

    Converters write -1000 for the scores of user-defined tokens. transformers sorts by id instead, which splits long
    runs of blanks and newlines in another way.
    """
    kinds, scores = metadata["tokenizer.ggml.token_type"], metadata["tokenizer.ggml.scores"]
    best = {token: 0.0 if kinds[index] == _USER_DEFINED else scores[index] for token, index in model["vocab"].items()}

    def priority(merge: list[str]) -> tuple[float, int, int]:
        left, right = merge
        return best[left + right], len(left), len(right)

    return sorted(model["merges"], key=priority, reverse=True)
