"""Bounds on what a tokenizer's files may do to a text: how far they expand it, and whether a short text is quick.

tokenizers runs native code that cannot be interrupted. A hostile tokenizer.json could replace each character of a
prompt by thousands, several times over, so the files are checked before any text is tokenized.
"""

import base64
import binascii
import json
import math
import re
from collections.abc import Iterator
from typing import Any

from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE

from tandemrt.engines.validation.errors import BadBundle

MAX_EXPANSION = 64  # characters for one; Unicode's own normal forms have at most 18
MAX_ADDED = 1024  # characters that a step adds to each text
MAX_PIECE = 1024  # characters of a token; other models than BPE try all pieces at each place
_NORMAL_FORM = 18  # the longest decomposition of a character
_FACTORS = {
    "NFC": 3, "NFD": 4, "NFKC": _NORMAL_FORM, "NFKD": _NORMAL_FORM, "Nmt": 1, "Lowercase": 3, "Strip": 1,
    "StripAccents": 1, "BertNormalizer": 3 * _NORMAL_FORM, "ByteLevel": 4, "Prepend": 1, "Sequence": 1,
    "Fuse": 1, "ByteFallback": 1, "Metaspace": 1,
}  # fmt: skip
PROBES = ("".join(map(chr, range(32, 127))), "e" * 64, " " * 64, "\u00e9\u4e2d\ufdfa\U0001f600" * 8, "a b\n" * 16)


def require_bounded(backend: Backend) -> None:
    """Raise BadBundle if the normalizer or the decoder may expand a text by more than ``MAX_EXPANSION``.

    Tokenizes ``PROBES`` once the files are within the bound, and raises BadBundle if these give too many tokens.
    """
    for part in ("normalizer", "decoder"):
        factor = math.prod(_expansion(part, step) for step in _steps(_part(backend, part)))
        if factor > MAX_EXPANSION:
            raise _rejected(part, f"expand a text at most {MAX_EXPANSION} times, got {factor} times")
    for probe in PROBES if is_quick(backend) else ():
        tokens, limit = len(backend.encode(probe)), MAX_EXPANSION * len(probe.encode()) + MAX_ADDED
        if tokens > limit:
            raise _rejected("tokenizer", f"give at most {limit} tokens for {len(probe)} characters, got {tokens}")


def is_quick(backend: Backend) -> bool:
    """Return whether tokenizing takes a time that a text's length bounds, quadratic at worst.

    False if a regular expression may backtrack, or a model tries very long pieces.
    """
    parts = [_part(backend, name) for name in ("normalizer", "pre_tokenizer")]
    patterns = [step["pattern"] for part in parts for step in _steps(part, "pattern")]
    regexes = [pattern["Regex"] for pattern in patterns if isinstance(pattern, dict) and "Regex" in pattern]
    if not all(map(is_linear, regexes)):
        return False
    return isinstance(backend.model, BPE) or max(map(len, backend.get_vocab(False)), default=0) <= MAX_PIECE


def is_linear(pattern: str) -> bool:
    """Return whether a regular expression reads each character few times from each beginning.

    True if no group with a choice or a repetition is repeated without bound, and each alternative has at most one
    unbounded repetition before something that must match. Patterns of published tokenizers are of this form.
    """
    text = re.sub(r"\\[pP]\{[^}]*\}|\\.|\[(?:\^?\])?(?:\\.|[^\]\\])*\]", "x", pattern, flags=re.DOTALL)
    while group := re.search(r"\((?:\?(?:[:!=>]|<[!=]|[a-z-]+:))?([^()]*)\)([*+?]|\{\d*,?\d*\})?", text):
        inner, repeat = group[1], group[2] or ""
        if not all(map(_is_simple, inner.split("|"))):
            return False
        unbounded = bool(_UNBOUNDED.search(inner))
        if (unbounded and repeat) or (_UNBOUNDED.search(repeat) and re.search(r"[|?{]", inner)):
            return False
        text = f"{text[: group.start()]}{'x+' if unbounded else 'x' + repeat}{text[group.end() :]}"
    return not re.search(r"[()]", text) and all(map(_is_simple, text.split("|")))


_UNBOUNDED = re.compile(r"[*+]|\{\d*,\}|\{\d*,?\d{3,}\}")
_REPEATED = re.compile(r".([*+]|\{\d*,\}|\{\d*,?\d{3,}\})[+?]?", re.DOTALL)


def _is_simple(alternative: str) -> bool:
    repeated = list(_REPEATED.finditer(alternative))
    if len(repeated) < 2:
        return True
    return len(repeated) == 2 and not re.sub(r".\?", "", alternative[repeated[1].end() :])


def _part(backend: Backend, name: str) -> Any:
    """Return the JSON value of a part of the tokenizer; None if it has no such part."""
    part = getattr(backend, name)
    return None if part is None else json.loads(part.__getstate__())


def _steps(part: Any, key: str = "type") -> Iterator[dict[str, Any]]:
    """Yield every object in ``part`` that has ``key``, at any depth."""
    if isinstance(part, dict):
        if key in part:
            yield part
        part = list(part.values())
    if isinstance(part, list):
        for each in part:
            yield from _steps(each, key)


def _expansion(part: str, step: dict[str, Any]) -> int:
    """Return the most characters that ``step`` makes of one. Raises BadBundle if it adds too many to a text."""
    kind = step["type"]
    if kind == "Replace":
        regex = step["pattern"].get("Regex")
        if part == "decoder" and regex is not None and not is_linear(regex):
            raise _rejected(part, "have no regular expression that may backtrack")
        searched = step["pattern"].get("String", "")
        grown = len(step["content"]) + (regex is not None)  # an expression may match the empty text
        return max(1, math.ceil(grown / max(1, len(searched))))
    if kind == "Prepend" and len(step["prepend"]) > MAX_ADDED:
        raise _rejected(part, f"add at most {MAX_ADDED} characters to a text, got {len(step['prepend'])}")
    if kind == "Precompiled":
        return max(1, max(map(len, _replacements(step["precompiled_charsmap"])), default=1))
    return _FACTORS.get(kind, 1) if part == "normalizer" else 1


def _replacements(charsmap: str) -> list[bytes]:
    """Return the texts in a compiled map of SentencePiece: a size, a trie of that many bytes, and texts ended by 0."""
    try:
        data = base64.b64decode(charsmap)
    except binascii.Error as error:
        raise _rejected("normalizer", f"have a readable precompiled_charsmap, got {error}") from error
    return data[4 + int.from_bytes(data[:4], "little") :].split(b"\0")


def _rejected(part: str, rule: str) -> BadBundle:
    return BadBundle(f"tokenizer.json: its {part} must {rule}; use the tokenizer of the model's publisher")
