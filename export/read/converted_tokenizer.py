"""Convert a tokenizer without tokenizer.json (sentencepiece, tekken, tiktoken), once, into the user's cache folder."""

import hashlib
import importlib.util
import json
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from tokenizers import Tokenizer as Backend
from tokenizers import normalizers, pre_tokenizers

from tandemrt.engines.text.tokenizer import read_tokenizer
from tandemrt.engines.user_cache import cache_folder
from tandemrt.engines.validation.errors import BadCheckpoint, clipped, quoted
from tandemrt.engines.validation.extras import pip_install
from tandemrt.export.read.original_tokenizers import Encode, OriginalFormat, find_original
from tandemrt.export.read.tokenizer_class import TEXTS

_FORMAT = 1  # of the written folders; another number writes them again
_SETTINGS = ("config.json", "generation_config.json", "chat_template.jinja", "chat_template.json")


def tokenizer_folder(folder: Path) -> Path:
    """Return the folder with the tokenizer.json of a checkpoint: its own, or one in the cache, converted if needed.

    Raises BadCheckpoint if there is no tokenizer, or if it cannot be converted.
    """
    original = find_original(folder)
    if original is None:
        _require_tokenizer(folder)
        return folder
    file, form = original
    stat = file.stat()
    named = json.dumps([_FORMAT, str(file.resolve()), stat.st_size, stat.st_mtime_ns])
    converted = cache_folder() / "tokenizers" / f"{folder.name}-{hashlib.sha256(named.encode()).hexdigest()[:12]}"
    if not converted.is_dir():
        _require_libraries(file, form)
        converted.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=converted.parent) as work:
            _convert(file, form, Path(work) / "tokenizer")
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
    original = find_original(folder)
    if original is None:
        return []
    file, form = original
    note = f"{file.name} was converted to tokenizer.json with transformers"
    ours, encode = read_tokenizer(tokenizer_folder(folder)).backend, form.encoder(file)
    if (text := _difference(ours, encode)) is None:
        return [f"{note}; {form.library} splits {len(TEXTS)} texts alike"]
    converted, theirs = ours.encode(text, add_special_tokens=False).ids, encode(text)
    return [
        f"{note}; it splits {quoted(text)} into {len(converted)} tokens, {clipped(converted)}, and {form.library} into "
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


def _require_libraries(file: Path, form: OriginalFormat) -> None:
    if missing := [name for name in ("transformers", form.library) if importlib.util.find_spec(name) is None]:
        raise BadCheckpoint(
            f"checkpoint must hold tokenizer.json; {file} can be converted, but {' and '.join(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} not installed: {pip_install('tokenizers')}"
        )


def _convert(file: Path, form: OriginalFormat, out: Path) -> None:
    """Write the converted tokenizer into the new folder ``out``."""
    try:
        form.convert(file, out)
    except Exception as error:  # a damaged file raises any exception
        raise BadCheckpoint(
            f"{file} must be a tokenizer that transformers converts: {clipped(error)}; take tokenizer.json of a "
            "conversion to transformers' format"
        ) from error
    if not (out / "tokenizer.json").is_file():
        raise BadCheckpoint(f"{file}: transformers opens it without writing tokenizer.json; save one by hand")
    _mend_leading_space(out / "tokenizer.json", lambda: form.encoder(file))


def _mend_leading_space(file: Path, encoder: Callable[[], Encode]) -> None:
    """Let a text that begins with a space get the space before it that sentencepiece adds to every text.

    The Metaspace step of transformers' conversion adds none there; published files of Llama add it by a normalizer.
    """
    backend = Backend.from_file(str(file))
    if not isinstance(backend.pre_tokenizer, pre_tokenizers.Metaspace):
        return
    encode = encoder()
    if _difference(backend, encode) is None:
        return
    mark = backend.pre_tokenizer.replacement
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(mark), normalizers.Replace(" ", mark)])
    backend.pre_tokenizer = None
    if _difference(backend, encode) is None:
        backend.save(str(file))


def _difference(ours: Backend, encode: Encode) -> str | None:
    """Return the first of ``TEXTS`` with other ids than ``encode`` gives, or None."""
    return next((text for text in TEXTS if ours.encode(text, add_special_tokens=False).ids != encode(text)), None)
