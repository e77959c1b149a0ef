"""Read a checkpoint's tokenizer: its number of ids, its stop ids, and the ids of reasoning delimiters."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandemrt.engines.bundle.manifest import ReasoningDelimiters
from tandemrt.engines.recipe.recipe import Reasoning
from tandemrt.engines.text.tokenizer import Tokenizer, read_tokenizer
from tandemrt.engines.validation.errors import BadCheckpoint, BadRecipe, BadRequest, TandemError, clipped, quoted
from tandemrt.export.read.converted_tokenizer import conversion_notes, tokenizer_folder
from tandemrt.export.read.delimiters import DelimiterEncoder
from tandemrt.export.read.tokenizer_class import split_notes

# The files that transformers may read for a tokenizer, its chat template and its defaults.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "tekken.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
    "config.json",
)


def missing_chat_template(model: str) -> BadRequest:
    """Return the error of a chat with a model that has no chat template."""
    return BadRequest(
        f"{quoted(model)}: must have a chat template named default, which makes a prompt of a message; it has none. "
        "Give one with --chat-template FILE, or continue a text with `tandemrt run --raw`"
    )


@dataclass(frozen=True)
class CheckpointTokenizer:
    """A checkpoint's tokenizer. ``folder`` has its tokenizer.json; ``size``: the largest id of a token, plus 1."""

    checkpoint: Path
    folder: Path
    opened: Tokenizer
    size: int

    @property
    def tokenizer(self) -> Any:
        """The tokenizer of the library ``tokenizers``."""
        return self.opened.backend

    @classmethod
    def open(cls, checkpoint: Path) -> "CheckpointTokenizer":
        """Read the tokenizer in the same way as the runtime. Raises BadCheckpoint if it is missing or damaged."""
        folder = tokenizer_folder(checkpoint)
        path = folder / "tokenizer.json"
        try:
            tokenizer = read_tokenizer(folder)
        except TandemError as error:  # names the file
            raise BadCheckpoint(f"checkpoint {folder}: {error}") from error
        except Exception as error:  # the library raises bare Exception
            raise BadCheckpoint(f"{path} must be a tokenizer: {clipped(error)}; download it again") from error
        ids = tokenizer.backend.get_vocab(with_added_tokens=True).values()
        return cls(checkpoint, folder, tokenizer, max(ids, default=-1) + 1)

    def notes(self, config: Mapping[str, Any]) -> list[str]:
        """Return notes on texts that transformers would split differently; ``config`` is the checkpoint's."""
        converted = conversion_notes(self.checkpoint)
        return converted + split_notes(self.tokenizer, self.folder, config, self._json("tokenizer_config.json"))

    def files(self) -> list[Path]:
        """Return the files to copy, chat templates included."""
        named = [self.folder / name for name in TOKENIZER_FILES]
        return [path for path in named if path.is_file()] + sorted(
            self.folder.glob("additional_chat_templates/*.jinja")
        )

    def stop_ids(self, config: Mapping[str, Any]) -> tuple[int, ...]:
        """Return all end-of-sequence ids of the generation config, the model config and the tokenizer.

        The three often differ (end of turn, end of text), and a model may emit any of them. Raises BadCheckpoint if
        there is none, or if one is not an id of the tokenizer.
        """
        tokenizer_config = self._json("tokenizer_config.json")
        token = tokenizer_config.get("eos_token")
        text = token.get("content") if isinstance(token, dict) else token
        named = [
            *_ids(self._json("generation_config.json").get("eos_token_id")),
            *_ids(config.get("eos_token_id")),
            *_ids(self.tokenizer.token_to_id(text) if isinstance(text, str) else None),
        ]
        if not named:
            rule = "generation_config.json, config.json or tokenizer_config.json must name an end-of-sequence token"
            raise BadCheckpoint(f"checkpoint {self.folder}: {rule}, none does; set eos_token_id in one of them")
        for stop in named:
            if type(stop) is not int or not 0 <= stop < self.size:
                rule = f"eos_token_id must be an id of the tokenizer, below {self.size}"
                raise BadCheckpoint(f"checkpoint {self.folder}: {rule}; got {quoted(stop)}; correct the config")
        return tuple(dict.fromkeys(named))

    def delimiters(self, reasoning: Reasoning, stop_ids: Iterable[int] = ()) -> ReasoningDelimiters:
        """Encode the delimiters of a recipe.

        Raises BadRecipe for a text that the tokenizer cannot encode, for equal delimiters, for a delimiter with a stop
        token, and for a ``forced_end`` that contains no end delimiter.
        """
        texts = {"think_start": reasoning.think_start, "forced_end": reasoning.forced_end}
        for name, several in (("think_ends", reasoning.think_ends), ("implicit_ends", reasoning.implicit_ends)):
            texts |= {f"{name}[{index}]": text for index, text in enumerate(several)}
        encoder = DelimiterEncoder.open(self.folder, self.size, [*texts.values()])
        encoded = {name: encoder.encode(f"reasoning.{name}", text) for name, text in texts.items()}
        start, forced_end = encoded.pop("think_start"), encoded.pop("forced_end")
        ends = tuple(delimiter for name, delimiter in encoded.items() if name.startswith("think_ends"))
        implicit_ends = tuple(delimiter for name, delimiter in encoded.items() if name.startswith("implicit"))
        every = [start, *ends, *implicit_ends]
        twice = [
            delimiter.text
            for at, delimiter in enumerate(every)
            if delimiter.text in [other.text for other in every[:at]]
        ]
        if twice:
            rule = "reasoning: think_start, think_ends and implicit_ends must differ"
            raise BadRecipe(f"{rule}; {quoted(twice[0])} appears twice")
        if stopping := [delimiter.text for delimiter in (*every, forced_end) if set(delimiter.ids) & set(stop_ids)]:
            raise BadRecipe(
                f"reasoning: a delimiter must not hold a stop token, which ends the text; {quoted(stopping[0])} does; "
                "choose another"
            )
        if not any(encoder.contains(forced_end, end) for end in ends):
            texts_of_ends = ", ".join(repr(end.text) for end in ends)
            raise BadRecipe(
                f"reasoning.forced_end must contain an end delimiter ({texts_of_ends}); got "
                f"{quoted(forced_end.text)}; add one"
            )
        return ReasoningDelimiters(
            think_start=start, think_ends=ends, forced_end=forced_end, implicit_ends=implicit_ends
        )

    def require_same_tokens(self, draft: "CheckpointTokenizer") -> None:
        """Raise BadRecipe if an id is a different token in the two tokenizers: no draft would be accepted."""
        for token in range(min(self.size, draft.size)):
            mine, theirs = self.tokenizer.id_to_token(token), draft.tokenizer.id_to_token(token)
            if mine != theirs and mine is not None and theirs is not None:
                raise BadRecipe(
                    f"draft.checkpoint: its tokenizer must have the target's ids; id {token} is {quoted(theirs)}, and "
                    f"{quoted(mine)} in the target; choose a draft of the target's family"
                )

    def _json(self, name: str) -> dict[str, Any]:
        path = self.folder / name
        if not path.is_file():
            return {}
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:
            raise BadCheckpoint(f"{path} must be JSON: {clipped(error)}; download it again") from error
        if not isinstance(data, dict):
            raise BadCheckpoint(f"{path} must hold a JSON object; it holds a {type(data).__name__}")
        return data


def _ids(value: Any) -> list[Any]:
    return [] if value is None else list(value) if isinstance(value, list) else [value]
