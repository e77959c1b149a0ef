"""Find texts that transformers splits differently from tokenizer.json, which a bundle follows.

transformers 5 opens some tokenizers with a class that takes vocabulary and merges from the file, but replaces the
file's splitting rules. Source of the classes and their rules: transformers 5.23, models/auto/tokenization_auto.py, the
tokenization_*.py of the classes, tokenization_utils_tokenizers.py.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Regex, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from tandemrt.engines.text.tokenizer import read_tokenizer
from tandemrt.engines.validation.errors import clipped, quoted

FILE = "TokenizersBackend"  # the class that follows the file
_GENERIC = (FILE, "PreTrainedTokenizerFast", "PreTrainedTokenizer", "PythonBackend")
_MISTRAL = ("mistral", "mistral3", "ministral3", "mixtral")
# model_type -> class; FILE applies even if tokenizer_config.json names another class.
_BY_TYPE = {
    **dict.fromkeys(("qwen2", "qwen3", "qwen3_moe"), "Qwen2Tokenizer"),
    **dict.fromkeys(("gemma2", "gemma3", "gemma3_text"), "GemmaTokenizer"),
    **dict.fromkeys((*_MISTRAL, "granite", "glm4", "olmo2", "olmo3", "phi3", "ernie4_5"), FILE),
}
_TYPE_DECIDES = ("qwen2", "phi3", "ernie4_5")  # the model_type overrides tokenizer_config.json
_QWEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEXTS = (
    *("Hello  world\n\nfoo", " leading", "  two", "1234 5,678.90 in 2026", "don't DON'T we'LL I'd", "a1b22c333"),
    *("tab\tand\r\nline\r\n\r\n end ", "x = [1, 2];\n\n\n\treturn x  # why?!\n", "caf\u00e9 cafe\u0301 nai\u0308ve"),
    *(
        "helloWorld HTTPServer",
        "漢字とかな 한국어",
        "😀👍🏽 ok...!!!",
        "\u00a0no break\u3000wide",
        "١٢٣ ½ Ⅷ",
        "/a//b/\n",
    ),
)


@dataclass(frozen=True)
class SplitDifference:
    """A ``text`` that transformers splits differently.

    ``opened_by``: the class of transformers that splits it into the ids ``theirs``. ``ours``: the ids of
    tokenizer.json.
    """

    opened_by: str
    text: str
    theirs: tuple[int, ...]
    ours: tuple[int, ...]


def split_notes(
    ours: Backend, folder: Path, config: Mapping[str, Any], tokenizer_config: Mapping[str, Any]
) -> list[str]:
    """Return one line for each way in which transformers may split texts differently.

    ``ours``: the tokenizer in ``folder`` as the bundle reads it. ``config``: config.json. ``tokenizer_config``:
    tokenizer_config.json.
    """
    notes = []
    if split := find_split_difference(ours, folder, config, tokenizer_config):
        notes.append(
            f"transformers opens this tokenizer with {split.opened_by}, which splits {quoted(split.text)} into "
            f"{len(split.theirs)} tokens, {clipped(split.theirs)}; the bundle splits it by tokenizer.json, into "
            f"{len(split.ours)}, {clipped(split.ours)}, as {FILE} of transformers does"
        )
    if config.get("model_type") in _MISTRAL and (folder / "tekken.json").is_file():
        notes.append(
            "where mistral-common is installed, transformers reads tekken.json; the bundle follows tokenizer.json, "
            "the two were not compared"
        )
    return notes


def find_split_difference(
    ours: Backend, folder: Path, config: Mapping[str, Any], tokenizer_config: Mapping[str, Any]
) -> SplitDifference | None:
    """Return the first of ``TEXTS`` that transformers splits differently from the file; None if there is none."""
    opened_by = class_of(
        config, tokenizer_config, byte_level='"ByteLevel"' in (folder / "tokenizer.json").read_text("utf-8")
    )
    rules = _RULES.get(opened_by) if isinstance(ours.model, models.BPE) else None
    mends = _mends_the_regex(config, tokenizer_config) and ours.get_vocab_size() > 100_000
    if rules is None and not mends:  # transformers follows the file, or the class is unknown
        return None
    theirs = read_tokenizer(folder).backend
    if rules is not None:
        rules(theirs, tokenizer_config)
    if mends:
        opened_by = f"{opened_by} (fix_mistral_regex)"
        _mend(theirs)
    for text in TEXTS:
        split, by_file = (tuple(each.encode(text, add_special_tokens=False).ids) for each in (theirs, ours))
        if split != by_file:
            return SplitDifference(opened_by, text, split, by_file)
    return None


def class_of(config: Mapping[str, Any], tokenizer_config: Mapping[str, Any], *, byte_level: bool) -> str:
    """Return the class that AutoTokenizer chooses. ``byte_level``: tokenizer.json has a ByteLevel step."""
    kind = str(config.get("model_type"))
    named, registered = tokenizer_config.get("tokenizer_class") or config.get("tokenizer_class"), _BY_TYPE.get(kind)
    if named is None:
        return registered or FILE
    declared = FILE if named in _GENERIC else str(named).removesuffix("Fast")
    if declared == "LlamaTokenizer" and byte_level and kind not in _TYPE_DECIDES:
        return FILE
    return registered if registered == FILE or (registered and kind in _TYPE_DECIDES) else declared


def _qwen2(backend: Backend, tokenizer_config: Mapping[str, Any]) -> None:
    _bpe(backend)
    backend.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(_QWEN), behavior="isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, _bytes(tokenizer_config, use_regex=False)])


def _gpt2(backend: Backend, tokenizer_config: Mapping[str, Any]) -> None:
    _bpe(backend)
    backend.normalizer, backend.pre_tokenizer = None, _bytes(tokenizer_config)


def _gpt_neox(backend: Backend, tokenizer_config: Mapping[str, Any]) -> None:
    _bpe(backend)
    backend.normalizer, backend.pre_tokenizer = normalizers.NFC(), _bytes(tokenizer_config)


def _llama(backend: Backend, tokenizer_config: Mapping[str, Any]) -> None:
    _bpe(backend, fuse_unk=True, byte_fallback=True)
    backend.normalizer = None
    spaced = tokenizer_config.get("add_prefix_space") is not False
    scheme = "never" if not spaced else "always" if tokenizer_config.get("legacy", False) else "first"
    backend.pre_tokenizer = pre_tokenizers.Metaspace("▁", scheme, split=False)


def _gemma(backend: Backend, tokenizer_config: Mapping[str, Any]) -> None:  # noqa: ARG001
    _bpe(backend, fuse_unk=True, byte_fallback=True)
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.pre_tokenizer = pre_tokenizers.Split(" ", behavior="merged_with_previous")


_RULES: Mapping[str, Callable[[Backend, Mapping[str, Any]], None]] = {
    "Qwen2Tokenizer": _qwen2,
    "GPT2Tokenizer": _gpt2,
    "GPTNeoXTokenizer": _gpt_neox,
    "LlamaTokenizer": _llama,
    "GemmaTokenizer": _gemma,
}


def _bpe(backend: Backend, *, fuse_unk: bool = False, byte_fallback: bool = False) -> None:
    """Set the merge options that the classes set in addition to vocabulary and merges."""
    model = backend.model
    model.fuse_unk, model.byte_fallback, model.ignore_merges = fuse_unk, byte_fallback, False


def _bytes(tokenizer_config: Mapping[str, Any], *, use_regex: bool = True) -> pre_tokenizers.ByteLevel:
    return pre_tokenizers.ByteLevel(
        add_prefix_space=bool(tokenizer_config.get("add_prefix_space")), use_regex=use_regex
    )


def _mends_the_regex(config: Mapping[str, Any], tokenizer_config: Mapping[str, Any]) -> bool:
    """Whether transformers replaces the wrong pattern of some of Mistral's files."""
    version = str(config.get("transformers_version") or "0").partition(".")[0]
    old = version.isdecimal() and int(version) < 5
    return (
        tokenizer_config.get("fix_mistral_regex") is True
        and old
        and config.get("model_type") in ("mistral", "mistral3")
    )


def _mend(backend: Backend) -> None:
    split, now = pre_tokenizers.Split(Regex(_TEKKEN), behavior="isolated"), backend.pre_tokenizer
    if isinstance(now, pre_tokenizers.Sequence):
        now[0] = split
        backend.pre_tokenizer = now
    elif now is not None:
        if isinstance(now, pre_tokenizers.Metaspace):
            now = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.pre_tokenizer = pre_tokenizers.Sequence([split, now])
