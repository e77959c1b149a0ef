"""Opening the tokenizer of a bundle, for the build that makes sure of it and for the runtime that uses it.

The same prompt must always be the same tokens, so what draws lots in a tokenizer is refused.
"""

from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import jinja2

from tandemrt.engines.errors import BadBundle, TandemError, clipped
from tandemrt.engines.vocabulary import Vocabulary, vocabulary_from_tokenizer


def open_tokenizer(load: Callable[..., Any], folder: Path, vocab_size: int) -> tuple[Any, Vocabulary]:
    """Return the tokenizer in ``folder`` and its vocabulary, for logits of width ``vocab_size``.

    ``load`` is ``transformers.AutoTokenizer.from_pretrained``, which this folder does not import. Raises BadBundle for
    a tokenizer that cannot be opened, does not work or does not fit.
    """
    try:
        tokenizer = load(folder, local_files_only=True, trust_remote_code=False)
        _require_function(tokenizer)
        _try_out(tokenizer)
        return tokenizer, vocabulary_from_tokenizer(tokenizer, vocab_size)
    except (TandemError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # whatever a strange value leads to; a panic of tokenizers is no Exception
        raise BadBundle(
            f"{folder}: transformers cannot use this tokenizer: {type(error).__name__}: {clipped(error)}; "
            "save it again with save_pretrained"
        ) from error


def chance_in_template(template: str) -> str | None:
    """Return what draws lots in a chat template, or None. A template that is no Jinja is left to fail by itself."""
    try:
        words = [text for _, kind, text in _JINJA.lex(template) if kind in ("operator", "name", "string")]
    except jinja2.TemplateSyntaxError:
        return None
    if "lipsum" in words:
        return "lipsum"
    for before, word in pairwise(words):
        if (before, word) == ("|", "random") or (before == "(" and word in ("'random'", '"random"')):
            return "the filter random"
    return None


_JINJA = jinja2.Environment(autoescape=False)  # only reads


def _require_function(tokenizer: Any) -> None:
    model = tokenizer.backend_tokenizer.model
    dropout, alpha = getattr(model, "dropout", None), getattr(model, "alpha", None)
    if dropout or alpha is not None:
        name, value = ("dropout", dropout) if dropout else ("alpha", alpha)
        raise BadBundle(
            f"tokenizer.json: model.{name} must be null, got {value}: it is for training and splits the same text "
            "in another way each time; set it to null"
        )
    for template in _templates(tokenizer.chat_template):
        if chance := chance_in_template(template):
            raise BadBundle(
                f"tokenizer: its chat template must give the same prompt for the same messages, got one with {chance}; "
                "rewrite it without"
            )


def _try_out(tokenizer: Any) -> None:
    # What transformers would otherwise do with the first prompt, at a time when other threads may use the tokenizer.
    tokenizer.backend_tokenizer.no_truncation()
    tokenizer.backend_tokenizer.no_padding()
    tokenizer.backend_tokenizer.decode(tokenizer.encode("a b", verbose=False), skip_special_tokens=True)


def _templates(given: Any) -> Iterable[str]:
    return given.values() if isinstance(given, Mapping) else [given] if isinstance(given, str) else []
