"""Run a decoder engine over fixed tokens in the same kinds of calls as the engine loop makes.

Prompts come in chunks, followed by draft windows and single tokens. As in serving, rows are at different positions,
advance by fewer tokens than a window has, and overwrite the cache entries of rejected tokens. With a paged cache,
prompts come in packed calls. The last packed call also has the first draft windows.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import torch

from tandemrt.engines.bundle.manifest import Limits
from tandemrt.engines.contract.calls import decoder_uses
from tandemrt.engines.contract.contract import BLOCK_SIZE, Contract, logits_width
from tandemrt.runtime.caches.kv_cache import BlockTable, Cache, PagedCache, is_paged, window_bindings
from tandemrt.runtime.caches.linear import LinearCache
from tandemrt.runtime.device.backends.base import Engine, prompt_rows

_MAX_CHUNK = 48  # tokens; longer chunks only cost time on the CPU
_STEP_KINDS = ("window", "window", "one", "window", "one", "one")


@dataclass(frozen=True)
class DecodePlan:
    """Tokens of each row and the calls that process them.

    Attributes:
        tokens: [rows][length], the text of each row.
        prompts: [rows], how many tokens of each row are its prompt.
        chunk: largest number of prompt tokens in a call.
        steps: calls after the prompts: number of new tokens per row, and of tokens by which each row advances.
    """

    tokens: tuple[tuple[int, ...], ...]
    prompts: tuple[int, ...]
    chunk: int
    steps: tuple[tuple[int, tuple[int, ...]], ...]

    @classmethod
    def within(cls, limits: Limits, valid_tokens: int, seed: int = 0) -> "DecodePlan":
        """Return a small plan of random tokens below ``valid_tokens`` that has every kind of call ``limits`` allow."""
        uses = decoder_uses(limits.batch, limits.num_draft_tokens, min(limits.prefill_chunk, _MAX_CHUNK))
        chunk, window = uses["prefill"]["query"].most, uses.get("window", uses["single"])["query"].most
        rows = min(3, limits.batch)
        longest = max(1, min(2 * chunk + 5, limits.length - 3 * window))
        prompts = tuple(max(1, longest // 3**row) for row in range(rows))
        steps: list[tuple[int, tuple[int, ...]]] = []
        positions = list(prompts)
        for kind in _STEP_KINDS:
            query = window if kind == "window" else 1
            if max(positions) + query > limits.capacity:
                break
            advance = tuple(1 + (row + len(steps)) % query for row in range(rows))
            steps.append((query, advance))
            positions = [position + step for position, step in zip(positions, advance, strict=True)]
        draw = Random(seed)
        length = min(limits.capacity, max(positions) + window)
        tokens = tuple(tuple(draw.randrange(valid_tokens) for _ in range(length)) for _ in prompts)
        return cls(tokens, prompts, chunk, tuple(steps))

    def packed_prompts(self) -> Iterator[tuple[tuple[int, int], ...]]:
        """Yield, for each packed call of at most ``chunk`` prompt tokens, [start, end) of each row's tokens."""
        done = [0] * len(self.prompts)
        while done != list(self.prompts):
            free, call = self.chunk, []
            for row, prompt in enumerate(self.prompts):
                end = min(done[row] + free, prompt)
                call.append((done[row], end))
                free -= end - done[row]
                done[row] = end
            yield tuple(call)

    def positions(self) -> Iterator[tuple[int, tuple[int, ...]]]:
        """Yield, for each step, the new tokens per row and the position of each row."""
        positions = list(self.prompts)
        for query, advance in self.steps:
            yield query, tuple(positions)
            positions = [position + step for position, step in zip(positions, advance, strict=True)]


def score_at_once(engine: Engine, plan: DecodePlan) -> torch.Tensor:
    """Return float32[rows, length, vocab]: logits of all tokens of all rows, from one call."""
    rows, length = len(plan.tokens), len(plan.tokens[0])
    runner = DecoderRunner(engine, rows)
    return runner.run(0, torch.tensor(plan.tokens), [0] * rows, torch.arange(length).repeat(rows, 1))


def score_as_served(
    engine: Engine, plan: DecodePlan, poison: float = 0.0
) -> Iterator[tuple[str, int, int, torch.Tensor]]:
    """Yield kind of call, row, position and float32 logits [vocab] for every token that ``plan`` scores.

    ``poison`` fills the caches before the first call.
    """
    runner = DecoderRunner(engine, len(plan.tokens), poison)
    steps = list(plan.positions())
    if is_paged(engine.contract):
        calls = list(plan.packed_prompts())
        for index, call in enumerate(calls):
            query, positions = steps.pop(0) if steps and index == len(calls) - 1 else (0, (0,) * len(call))
            logits = runner.run_packed(plan.tokens, call, query, positions)
            if query:
                yield from _by_position("packed", query, positions, logits)
            else:
                yield from (("prefill", row, end - 1, logits[row, 0]) for row, (at, end) in enumerate(call) if end > at)
    else:
        for row, prompt in enumerate(plan.prompts):
            for start in range(0, prompt, plan.chunk):
                chunk = plan.tokens[row][start : min(start + plan.chunk, prompt)]
                last = len(chunk) - 1
                score = torch.full((1, prompt_rows(engine)), last)  # as in serving: only the last token is scored
                for logits in runner.run(row, torch.tensor([chunk]), [start], score)[0]:
                    yield "prefill", row, start + last, logits
    for query, positions in steps:
        tokens = [list(row[at : at + query]) for row, at in zip(plan.tokens, positions, strict=True)]
        logits = runner.run(0, torch.tensor(tokens), list(positions), torch.arange(query).repeat(len(tokens), 1))
        yield from _by_position("one" if query == 1 else "window", query, positions, logits)


class DecoderRunner:
    """An engine with its own cache of ``rows`` rows, filled with ``poison``."""

    def __init__(self, engine: Engine, rows: int, poison: float = 0.0) -> None:
        self._engine = engine
        self.cache = make_cache(engine, rows)
        for tensor in self.cache.tensors.values():
            tensor.fill_(poison)
        if isinstance(self.cache, LinearCache) and self.cache.states is not None:
            for row in range(rows):
                self.cache.states.clear(row)

    def run(self, first: int, tokens: torch.Tensor, index: list[int], score: torch.Tensor) -> torch.Tensor:
        """Run one call for the rows from ``first`` on; return float32[batch, rows, vocab] on the host.

        Args:
            tokens: int64[batch, query].
            index: position of each row's first token.
            score: int64[batch, rows], which tokens of the call get logits.
        """
        tensors = {**window_bindings(self._engine.contract, tokens, score), "write_index": torch.tensor(index)}
        certain = 0 if score.shape[1] else tokens.shape[1] - 1  # a prompt is final up to its last token, as in serving
        return self._run(tensors, first, certain=certain)

    def run_packed(
        self, texts: Sequence[Sequence[int]], runs: Sequence[tuple[int, int]], query: int, positions: Sequence[int]
    ) -> torch.Tensor:
        """Run one packed call; return float32[slots, query, vocab] on the host.

        The call has ``query`` tokens of every slot from its position on, then tokens [start, end) of its text as the
        prompt run. The logits are those of the ``query`` tokens; for ``query`` 0 those of the last token of every run,
        [slots, 1, vocab]. Padding follows the runs.
        """
        rows, counts = len(runs), torch.tensor([end - at for at, end in runs])
        ids = [token for text, at in zip(texts, positions, strict=True) for token in text[at : at + query]]
        ids += [token for text, run in zip(texts, runs, strict=True) for token in text[slice(*run)]]
        padding = 0 if query else 1  # one padding token if there are no windows
        ends = counts.cumsum(0)
        score = torch.arange(rows * query).view(rows, query) if query else (ends - 1).clamp(min=0)[:, None]
        tensors = {
            "token_ids": torch.tensor(ids + [0] * padding),
            "write_index": torch.tensor(positions),
            "score_rows": score,
            "prompt_rows": torch.cat([torch.arange(rows).repeat_interleave(counts), torch.full((padding,), -1)]).int(),
            "prompt_starts": torch.cat([torch.zeros(1, dtype=torch.int64), ends]).int(),
            "prompt_index": torch.tensor([at for at, _ in runs]),
        }
        slots = torch.arange(rows, device=self._engine.device)
        return self._run({**tensors, "prompt_table": self.cache.rows(0, rows)["block_table"]}, 0, prompt_slots=slots)

    def _run(
        self, inputs: Mapping[str, Any], first: int, *, certain: int = 0, prompt_slots: torch.Tensor | None = None
    ) -> torch.Tensor:
        contract, device = self._engine.contract, self._engine.device
        shape = (*inputs["score_rows"].shape, logits_width(contract))
        logits = torch.full(shape, float("nan"), dtype=getattr(torch, contract["logits"].dtype), device=device)
        on_device = {name: tensor.to(device) for name, tensor in inputs.items()}
        tensors = {**on_device, **state_tensors(contract, on_device), "logits": logits}
        self.cache.bind(self._engine, first, tensors, certain=certain, prompt_slots=prompt_slots).run()
        return logits.float().cpu()


def state_tensors(contract: Contract, tensors: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the hidden-state and feature tensors that ``contract`` has (of targets and draft heads).

    The state of a token depends on its id alone, so it is the same in every call.
    """
    hidden = {}
    sizes = {"batch": tensors["score_rows"].shape[0], "rows": tensors["score_rows"].shape[1]}
    sizes |= dict(
        zip(("tokens",) if is_paged(contract) else ("batch", "query"), tensors["token_ids"].shape, strict=True)
    )
    for binding in (*contract.inputs, *contract.outputs):
        if binding.name in ("states", "features", "next_states"):
            hidden[binding.name] = torch.zeros(
                binding.resolve(sizes), dtype=getattr(torch, binding.dtype), device=tensors["token_ids"].device
            )
    if any(binding.name == "image_rows" for binding in contract.inputs):
        names = {binding.name for binding in contract.inputs}
        hidden |= {name: value for name, value in _text_inputs(contract, tensors).items() if name in names}
    if "states" in hidden:
        wave = torch.arange(hidden["states"].shape[-1], device=hidden["states"].device)
        hidden["states"].copy_((tensors["token_ids"][..., None] + 1) * (wave + 1) % 97 / 48.5 - 1)
    return hidden


def _text_inputs(contract: Contract, tensors: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the inputs of a model that reads images for tokens of text."""
    ids, states = tensors["token_ids"], contract["image_states"]
    return {
        "positions": _positions(tensors).expand(3, *ids.shape).contiguous(),
        "image_rows": torch.zeros_like(ids),
        "image_ends": torch.zeros_like(ids),
        "image_states": torch.zeros(1, int(states.shape[-1]), dtype=getattr(torch, states.dtype), device=ids.device),
    }


def _positions(tensors: Mapping[str, Any]) -> torch.Tensor:
    """Return the position of each token of a call, int64 like its ``token_ids``."""
    ids, index = tensors["token_ids"], tensors["write_index"]
    runs = tensors.get("prompt_rows", ids[:0])
    query = (ids.shape[-1] - len(runs)) // len(index) if ids.dim() == 1 else ids.shape[1]
    windows: torch.Tensor = index[:, None] + torch.arange(query, device=ids.device)
    if ids.dim() > 1:
        return windows
    rows = runs.long().clamp(min=0)  # padding has no row
    in_run = torch.arange(len(runs), device=ids.device) - tensors.get("prompt_starts", ids)[rows]
    prompts = tensors.get("prompt_index", ids)[rows] + in_run
    return torch.cat([windows.flatten(), prompts.where(runs >= 0, 0)])


def is_decoder(contract: Contract) -> bool:
    """Whether an engine is a model, with tokens as input."""
    return any(binding.name == "token_ids" for binding in contract.inputs)


def make_cache(engine: Engine, rows: int) -> Cache:
    """Return a cache for ``rows`` rows of full length."""
    contract, device = engine.contract, engine.device
    if not is_paged(contract):
        return LinearCache(contract, rows, device)
    max_blocks = int(contract["block_table"].shape[1])
    table = BlockTable(rows, max_blocks, 1 + rows * max_blocks, device)
    for row in range(rows):
        table.reserve(row, max_blocks * BLOCK_SIZE)
    table.flush()
    return PagedCache(engine, table)


def _by_position(
    kind: str, query: int, positions: Sequence[int], logits: torch.Tensor
) -> Iterator[tuple[str, int, int, torch.Tensor]]:
    for row, at in enumerate(positions):
        for index in range(query):
            yield kind, row, at + index, logits[row, index]
