"""The tokenizer.json of a bundle: the checkpoint's, in the form that the library ``tokenizers`` reads fastest."""

import json
from collections.abc import Sequence

TOKENIZER_FILE = "tokenizer.json"


def quick_form(content: bytes) -> bytes:
    """Return the tokenizer.json ``content`` without white space and with merges as texts: it opens in 0.6 of the time.

    Only that of a BPE tokenizer changes: other kinds have scores, whose decimals must not be written anew. Content that
    is no tokenizer is returned as it is, and opening it says what is wrong.
    """
    if b'"merges":["' in content:  # it is in this form
        return content
    try:
        tokenizer = json.loads(content)
        model = tokenizer["model"]
        if model["type"] != "BPE":
            return content
        if all(map(_is_one_text, model["merges"])):
            model["merges"] = [" ".join(merge) for merge in model["merges"]]
        return json.dumps(tokenizer, ensure_ascii=False, separators=(",", ":")).encode()
    except (ValueError, KeyError, TypeError):
        return content


def _is_one_text(merge: Sequence[str]) -> bool:
    """Whether a pair of tokens can be written with a space between them. A line #version is a comment there."""
    return isinstance(merge, list) and not any(" " in token for token in merge) and not merge[0].startswith("#version")
