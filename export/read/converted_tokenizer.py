"""Convert a tokenizer without tokenizer.json (sentencepiece, tekken, tiktoken), once, into the user's cache folder."""

import hashlib
import importlib.util
import json
import shutil
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tokenizers import AddedToken, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from tandemrt.engines.text.tokenizer import read_tokenizer
from tandemrt.engines.user_cache import cache_folder
from tandemrt.engines.validation.errors import BadCheckpoint, clipped, quoted
from tandemrt.export.read.tokenizer_class import TEXTS

_FORMAT = 1  # of the written folders; another number writes them again
ORIGINALS = ("tekken.json", "tokenizer.model", "tiktoken.model")  # the first one that exists is converted
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
_SETTINGS = ("config.json", "generation_config.json", "chat_template.jinja", "chat_template.json")
Encode = Callable[[str], list[int]]


def original_file(folder: Path) -> Path | None:
    """Return the file to convert in a folder without tokenizer.json; None: there is nothing to convert."""
    if (folder / "tokenizer.json").is_file():
        return None
    found = next((folder / name for name in ORIGINALS if (folder / name).is_file()), None)
    return None if found is not None and found.name == "tiktoken.model" and _split(folder) is None else found


def tokenizer_folder(folder: Path) -> Path:
    """Return the folder with the tokenizer.json of a checkpoint: its own, or one in the cache, converted if needed.

    Raises BadCheckpoint if there is no tokenizer, or if it cannot be converted.
    """
    original = original_file(folder)
    if original is None:
        _require_tokenizer(folder)
        return folder
    stat = original.stat()
    named = json.dumps([_FORMAT, str(original.resolve()), stat.st_size, stat.st_mtime_ns])
    converted = cache_folder() / "tokenizers" / f"{folder.name}-{hashlib.sha256(named.encode()).hexdigest()[:12]}"
    if not converted.is_dir():
        _require_libraries(original)
        converted.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=converted.parent) as work:
            _convert(original, Path(work) / "tokenizer")
            with suppress(OSError):  # another process has just converted it
                (Path(work) / "tokenizer").rename(converted)
    for path in [*(folder / name for name in _SETTINGS), folder / "additional_chat_templates"]:
        if path.is_file():
            shutil.copyfile(path, converted / path.name)
        elif path.is_dir():
            shutil.copytree(path, converted / path.name, dirs_exist_ok=True)
    return converted


def conversion_notes(folder: Path) -> list[str]:
    """Return notes on a conversion: the first text that the original library splits differently."""
    original = original_file(folder)
    if original is None:
        return []
    note = f"{original.name} was converted to tokenizer.json with transformers"
    ours, (encode, library) = read_tokenizer(tokenizer_folder(folder)).backend, _original_encoder(original)
    if (text := _difference(ours, encode)) is None:
        return [f"{note}; {library} splits {len(TEXTS)} texts alike"]
    converted, theirs = ours.encode(text, add_special_tokens=False).ids, encode(text)
    return [
        f"{note}; it splits {quoted(text)} into {len(converted)} tokens, {clipped(converted)}, and {library} into "
        f"{len(theirs)}, {clipped(theirs)}"
    ]


def _require_tokenizer(folder: Path) -> None:
    path = folder / "tokenizer.json"
    if path.is_file():
        return
    if other := next((file for pattern in ("*tiktoken*", "*.model") for file in sorted(folder.glob(pattern))), None):
        raise BadCheckpoint(
            f"checkpoint must hold tokenizer.json; {folder} has {other.name}, which only the repository's own code can "
            "read, and a build runs no such code. Convert it: AutoTokenizer.from_pretrained(..., "
            "trust_remote_code=True), or take the tokenizer.json of a conversion to transformers' format"
        )
    advice = "save it with transformers: AutoTokenizer.from_pretrained(...).save_pretrained(...)"
    raise BadCheckpoint(f"checkpoint must hold tokenizer.json; {path} is missing; {advice}")


def _require_libraries(original: Path) -> None:
    needed = ["transformers", "sentencepiece" if original.name == "tokenizer.model" else "tiktoken"]
    if missing := [name for name in needed if importlib.util.find_spec(name) is None]:
        raise BadCheckpoint(
            f"checkpoint must hold tokenizer.json; {original} can be converted, but {' and '.join(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} not installed: pip install 'tandemrt[tokenizers]'"
        )


def _convert(original: Path, out: Path) -> None:
    """Write the converted tokenizer into the new folder ``out``."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    opened: Any = PreTrainedTokenizerFast if original.name == "tekken.json" else AutoTokenizer
    try:
        if original.name == "tiktoken.model":
            _convert_tiktoken(original, out)
            return
        opened.from_pretrained(original.parent, local_files_only=True, trust_remote_code=False).save_pretrained(out)
    except Exception as error:  # a damaged file raises any exception
        raise BadCheckpoint(
            f"{original} must be a tokenizer that transformers converts: {clipped(error)}; take tokenizer.json of a "
            "conversion to transformers' format"
        ) from error
    if not (out / "tokenizer.json").is_file():
        raise BadCheckpoint(f"{original}: transformers opens it without writing tokenizer.json; save one by hand")
    _mend_leading_space(original, out / "tokenizer.json")


def _convert_tiktoken(original: Path, out: Path) -> None:
    """Write a tiktoken file and its reserved tokens, which tokenizer_config.json names, as a tokenizer.json."""
    from transformers.convert_slow_tokenizer import TikTokenConverter

    config = _config(original.parent)
    converter: Any = TikTokenConverter(vocab_file=str(original), pattern=_split(original.parent))
    backend: Backend = converter.converted()
    listed, begin = config.get("added_tokens_decoder") or {}, backend.get_vocab_size()
    for at in range(begin, begin + _RESERVED):
        given = listed.get(str(at), {})
        token = AddedToken(given.get("content", f"<|reserved_token_{at}|>"), normalized=False)
        (backend.add_special_tokens if given.get("special", True) else backend.add_tokens)([token])
    out.mkdir()
    backend.save(str(out / "tokenizer.json"))
    kept = {name: value for name, value in config.items() if name != "auto_map"}
    written = json.dumps(kept | {"tokenizer_class": "PreTrainedTokenizerFast"})
    (out / "tokenizer_config.json").write_text(written, encoding="utf-8")


def _config(folder: Path) -> dict[str, Any]:
    try:
        found = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _split(folder: Path) -> str | None:
    """Return the expression by which the code of a checkpoint splits text; None: it is not known."""
    code = _config(folder).get("auto_map")
    named = code.get("AutoTokenizer") if isinstance(code, dict) else None
    return _SPLITS.get(str(named[0] if isinstance(named, list) and named else named))


def _mend_leading_space(original: Path, file: Path) -> None:
    """Let a text that begins with a space get the space before it that sentencepiece adds to every text.

    The Metaspace step of transformers' conversion adds none there; published files of Llama add it by a normalizer.
    """
    backend, (encode, _) = Backend.from_file(str(file)), _original_encoder(original)
    if not isinstance(backend.pre_tokenizer, pre_tokenizers.Metaspace) or _difference(backend, encode) is None:
        return
    mark = backend.pre_tokenizer.replacement
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(mark), normalizers.Replace(" ", mark)])
    backend.pre_tokenizer = None
    if _difference(backend, encode) is None:
        backend.save(str(file))


def _difference(ours: Backend, encode: Encode) -> str | None:
    """Return the first of ``TEXTS`` with other ids than ``encode`` gives, or None."""
    return next((text for text in TEXTS if ours.encode(text, add_special_tokens=False).ids != encode(text)), None)


def _original_encoder(original: Path) -> tuple[Encode, str]:
    """Return the original library's function from a text to token ids, and the name of the library."""
    if original.name == "tekken.json":
        return _tekken(json.loads(original.read_text(encoding="utf-8"))), "tiktoken"
    if original.name == "tiktoken.model":
        import tiktoken
        from tiktoken.load import load_tiktoken_bpe

        ranks, split = load_tiktoken_bpe(str(original)), str(_split(original.parent))
        return tiktoken.Encoding("original", pat_str=split, mergeable_ranks=ranks, special_tokens={}).encode, "tiktoken"
    from sentencepiece import SentencePieceProcessor

    processor = SentencePieceProcessor(model_file=str(original))
    return lambda text: list(processor.encode(text)), "sentencepiece"


def _tekken(data: dict[str, Any]) -> Encode:
    import base64

    import tiktoken

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
