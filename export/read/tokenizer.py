"""What the tokenizer says: how many ids spell something, which ids stop, and how markers are spelled."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandemrt.engines.errors import BadCheckpoint, BadRecipe, clipped, quoted
from tandemrt.engines.manifest import Markers
from tandemrt.engines.recipe import Reasoning
from tandemrt.engines.tokenizer import read_tokenizer
from tandemrt.export.read.speller import Speller
from tandemrt.export.read.tokenizer_class import split_notes

# Everything that transformers may read to build a tokenizer, its chat template and its defaults.
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


@dataclass(frozen=True)
class CheckpointTokenizer:
    """The tokenizer of a checkpoint folder. ``size`` is one past the largest id that spells something."""

    folder: Path
    tokenizer: Any
    size: int

    @classmethod
    def open(cls, folder: Path) -> "CheckpointTokenizer":
        """Read the tokenizer as the runtime will. Raises BadCheckpoint when it is missing or damaged."""
        path = folder / "tokenizer.json"
        if not path.is_file():
            advice = "save it with transformers: AutoTokenizer.from_pretrained(...).save_pretrained(...)"
            raise BadCheckpoint(f"checkpoint must hold tokenizer.json; {path} is missing; {advice}")
        try:
            tokenizer = read_tokenizer(folder).backend
        except Exception as error:  # the library raises bare Exception
            raise BadCheckpoint(f"{path} must be a tokenizer: {clipped(error)}; download it again") from error
        return cls(folder, tokenizer, max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1)

    def notes(self, config: Mapping[str, Any]) -> list[str]:
        """Where transformers would split a text in another way, a line each; ``config`` is the checkpoint's."""
        return split_notes(self.tokenizer, self.folder, config, self._json("tokenizer_config.json"))

    def files(self) -> list[Path]:
        """The files to copy, chat templates included."""
        named = [self.folder / name for name in TOKENIZER_FILES]
        return [path for path in named if path.is_file()] + sorted(
            self.folder.glob("additional_chat_templates/*.jinja")
        )

    def stop_ids(self, config: Mapping[str, Any]) -> tuple[int, ...]:
        """Every end-of-sequence id that the generation config, the model config and the tokenizer name.

        The three often name different ones (end of turn, end of text), and a model may write any of them.
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

    def markers(self, reasoning: Reasoning, stop_ids: Iterable[int] = ()) -> Markers:
        """Spell all markers of a recipe. Raises BadRecipe for one that cannot be, or that cannot work."""
        texts = {"start": reasoning.start, "forced_end": reasoning.forced_end}
        for name, several in (("ends", reasoning.ends), ("implicit_ends", reasoning.implicit_ends)):
            texts |= {f"{name}[{index}]": text for index, text in enumerate(several)}
        speller = Speller.open(self.folder, self.size, [*texts.values()])
        spelled = {name: speller.spell(f"reasoning.{name}", text) for name, text in texts.items()}
        start, forced_end = spelled.pop("start"), spelled.pop("forced_end")
        ends = tuple(marker for name, marker in spelled.items() if name.startswith("ends"))
        implicit_ends = tuple(marker for name, marker in spelled.items() if name.startswith("implicit"))
        every = [start, *ends, *implicit_ends]
        twice = [marker.text for at, marker in enumerate(every) if marker.text in [other.text for other in every[:at]]]
        if twice:
            raise BadRecipe(f"reasoning: start, ends and implicit_ends must differ; {quoted(twice[0])} appears twice")
        if stopping := [marker.text for marker in (*every, forced_end) if set(marker.ids) & set(stop_ids)]:
            raise BadRecipe(
                f"reasoning: a marker must not hold a stop token, which ends the text; {quoted(stopping[0])} does; "
                "choose another"
            )
        if not any(speller.holds(forced_end, end) for end in ends):
            texts_of_ends = ", ".join(repr(end.text) for end in ends)
            raise BadRecipe(
                f"reasoning.forced_end must contain an end marker ({texts_of_ends}); got {quoted(forced_end.text)}; "
                "add one"
            )
        return Markers(start=start, ends=ends, forced_end=forced_end, implicit_ends=implicit_ends)

    def require_same_tokens(self, draft: "CheckpointTokenizer") -> None:
        """Raise BadRecipe when an id that both tokenizers know spells different tokens: no draft would be accepted."""
        for token in range(min(self.size, draft.size)):
            mine, theirs = self.tokenizer.id_to_token(token), draft.tokenizer.id_to_token(token)
            if mine != theirs and mine is not None and theirs is not None:
                raise BadRecipe(
                    f"draft.checkpoint: its tokenizer must spell ids as the target's does; id {token} is "
                    f"{quoted(theirs)}, and {quoted(mine)} in the target; choose a draft of the target's family"
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
