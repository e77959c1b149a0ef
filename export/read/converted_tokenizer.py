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

from tokenizers import Tokenizer as Backend
from tokenizers import normalizers, pre_tokenizers

from tandemrt.engines.text.tokenizer import read_tokenizer
from tandemrt.engines.user_cache import cache_folder
from tandemrt.engines.validation.errors import BadCheckpoint, clipped, quoted
from tandemrt.export.read.tokenizer_class import TEXTS

_FORMAT = 1  # of the written folders; another number writes them again
ORIGINALS = ("tekken.json", "tokenizer.model")  # the first one that exists is converted
_SETTINGS = ("config.json", "generation_config.json", "chat_template.jinja", "chat_template.json")
Encode = Callable[[str], list[int]]


def original_file(folder: Path) -> Path | None:
    """Return the file to convert in a folder without tokenizer.json; None: there is nothing to convert."""
    if (folder / "tokenizer.json").is_file():
        return None
    return next((folder / name for name in ORIGINALS if (folder / name).is_file()), None)


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
    needed = ["transformers", "tiktoken" if original.name == "tekken.json" else "sentencepiece"]
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
        opened.from_pretrained(original.parent, local_files_only=True, trust_remote_code=False).save_pretrained(out)
    except Exception as error:  # a damaged file raises any exception
        raise BadCheckpoint(
            f"{original} must be a tokenizer that transformers converts: {clipped(error)}; take tokenizer.json of a "
            "conversion to transformers' format"
        ) from error
    if not (out / "tokenizer.json").is_file():
        raise BadCheckpoint(f"{original}: transformers opens it without writing tokenizer.json; save one by hand")
    _mend_leading_space(original, out / "tokenizer.json")


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
