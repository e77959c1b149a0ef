"""File formats of tokenizers without tokenizer.json: how each is converted, and how its own library encodes."""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

# How a class splits text, by the name of its code in tokenizer_config.json: a tiktoken file does not say.
_KIMI = "|".join((
    r"[\p{Han}]+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    *(r"\p{N}{1,3}", r" ?[^\s\p{L}\p{N}]+[\r\n]*", r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+"),
))  # fmt: skip
_SPLITS = {"tokenization_kimi.TikTokenTokenizer": _KIMI}
_RESERVED = 256  # tokens of Kimi after those of the tiktoken file
Encode = Callable[[str], list[int]]


@dataclass(frozen=True)
class OriginalFormat:
    """A file format: the file's name, the library that reads it, and what is done with a file of it."""

    file: str
    library: str
    convert: Callable[[Path, Path], None]  # write the tokenizer in transformers' format into a new folder
    encoder: Callable[[Path], Encode]  # return the library's function from a text to token ids
    can_convert: Callable[[Path], bool] = Path.is_file


def find_original(folder: Path) -> tuple[Path, OriginalFormat] | None:
    """Return the file to convert in a folder without tokenizer.json, and its format, or None."""
    if (folder / "tokenizer.json").is_file():
        return None
    there = ((folder / each.file, each) for each in FORMATS)
    return next(((file, each) for file, each in there if each.can_convert(file)), None)


def _convert_tekken(file: Path, out: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    _save(PreTrainedTokenizerFast, file, out)


def _convert_sentencepiece(file: Path, out: Path) -> None:
    from transformers import AutoTokenizer

    _save(AutoTokenizer, file, out)


def _save(opened: Any, file: Path, out: Path) -> None:
    opened.from_pretrained(file.parent, local_files_only=True, trust_remote_code=False).save_pretrained(out)


def _convert_tiktoken(file: Path, out: Path) -> None:
    """Write a tiktoken file and its reserved tokens, which tokenizer_config.json names, as a tokenizer.json."""
    from transformers.convert_slow_tokenizer import TikTokenConverter

    config = _config(file.parent)
    converter: Any = TikTokenConverter(vocab_file=str(file), pattern=_split(file))
    backend: Backend = converter.converted()
    listed, begin = config.get("added_tokens_decoder") or {}, backend.get_vocab_size()
    for at in range(begin, begin + _RESERVED):
        entry = listed.get(str(at), {})
        token = AddedToken(entry.get("content", f"<|reserved_token_{at}|>"), normalized=False)
        (backend.add_special_tokens if entry.get("special", True) else backend.add_tokens)([token])
    out.mkdir()
    backend.save(str(out / "tokenizer.json"))
    kept = {name: value for name, value in config.items() if name != "auto_map"}
    written = json.dumps(kept | {"tokenizer_class": "PreTrainedTokenizerFast"})
    (out / "tokenizer_config.json").write_text(written, encoding="utf-8")


def _can_convert_tiktoken(file: Path) -> bool:
    return file.is_file() and _split(file) is not None


def _config(folder: Path) -> dict[str, Any]:
    try:
        config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return config if isinstance(config, dict) else {}


def _split(file: Path) -> str | None:
    """Return the expression by which the code of a tiktoken file's checkpoint splits text; None: it is not known."""
    code = _config(file.parent).get("auto_map")
    named = code.get("AutoTokenizer") if isinstance(code, dict) else None
    return _SPLITS.get(str(named[0] if isinstance(named, list) and named else named))


def _sentencepiece_encoder(file: Path) -> Encode:
    from sentencepiece import SentencePieceProcessor

    processor = SentencePieceProcessor(model_file=str(file))
    return lambda text: list(processor.encode(text))


def _tiktoken_encoder(file: Path) -> Encode:
    import tiktoken
    from tiktoken.load import load_tiktoken_bpe

    ranks, split = load_tiktoken_bpe(str(file)), str(_split(file))
    return tiktoken.Encoding("original", pat_str=split, mergeable_ranks=ranks, special_tokens={}).encode


def _tekken_encoder(file: Path) -> Encode:
    import base64

    import tiktoken

    data = json.loads(file.read_text(encoding="utf-8"))
    config = data["config"]
    special = config.get("default_num_special_tokens") or len(data["special_tokens"])
    ranks: Iterable[Any] = data["vocab"][: config["default_vocab_size"] - special]
    encoding = tiktoken.Encoding(
        "tekken",
        pat_str=config["pattern"],
        mergeable_ranks={base64.b64decode(each["token_bytes"]): at for at, each in enumerate(ranks)},
        special_tokens={},
    )
    return lambda text: [token + special for token in encoding.encode(text)]


FORMATS = (  # the first one that can be converted is
    OriginalFormat("tekken.json", "tiktoken", _convert_tekken, _tekken_encoder),
    OriginalFormat("tokenizer.model", "sentencepiece", _convert_sentencepiece, _sentencepiece_encoder),
    OriginalFormat("tiktoken.model", "tiktoken", _convert_tiktoken, _tiktoken_encoder, _can_convert_tiktoken),
)
