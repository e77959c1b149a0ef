"""A decoder led along given tokens the way the runtime leads it: prompts in chunks, then windows and single tokens.

Rows stand at different places, advance by different numbers of tokens and so write behind their ends and again over
what they wrote, as rounds do. Over a paged cache prompts are runs of packed calls, the last of which has the first
windows in it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from random import Random

import torch

from tandemrt.engines.calls import decoder_uses
from tandemrt.engines.contract import BLOCK_SIZE, Contract, logits_width
from tandemrt.engines.manifest import Limits
from tandemrt.runtime.backends.base import Engine, prompt_rows
from tandemrt.runtime.caches.kv_cache import BlockTable, Cache, PagedCache, is_paged, windows
from tandemrt.runtime.caches.linear import LinearCache

_CHUNK = 48  # tokens, at most: longer ones only cost the CPU time
_QUERIES = ("window", "window", "one", "window", "one", "one")


@dataclass(frozen=True)
class Plan:
    """``tokens`` [rows][...]: what each row is fed; ``prompts``: how many of them in chunks of ``chunk``.

    ``steps``: new tokens per row of each call that follows, and how far each row really advances by it.
    """

    tokens: tuple[tuple[int, ...], ...]
    prompts: tuple[int, ...]
    chunk: int
    steps: tuple[tuple[int, tuple[int, ...]], ...]

    @classmethod
    def of(cls, limits: Limits, valid_tokens: int, seed: int = 0) -> "Plan":
        """As many rows, calls and tokens as the limits allow, and no more than shows whether an engine is right."""
        uses = decoder_uses(limits.batch, limits.window, min(limits.prefill_chunk, _CHUNK))
        chunk, window = uses["prefill"]["query"].most, uses.get("window", uses["single"])["query"].most
        rows = min(3, limits.batch)
        longest = max(1, min(2 * chunk + 5, limits.length - 3 * window))
        prompts = tuple(max(1, longest // 3**row) for row in range(rows))
        steps: list[tuple[int, tuple[int, ...]]] = []
        places = list(prompts)
        for kind in _QUERIES:
            query = window if kind == "window" else 1
            if max(places) + query > limits.capacity:
                break
            advance = tuple(1 + (row + len(steps)) % query for row in range(rows))
            steps.append((query, advance))
            places = [place + step for place, step in zip(places, advance, strict=True)]
        draw = Random(seed)
        length = min(limits.capacity, max(places) + window)
        tokens = tuple(tuple(draw.randrange(valid_tokens) for _ in range(length)) for _ in prompts)
        return cls(tokens, prompts, chunk, tuple(steps))

    def runs(self) -> Iterator[tuple[tuple[int, int], ...]]:
        """For each packed call of at most ``chunk`` prompt tokens: where each row's run begins and ends."""
        done = [0] * len(self.prompts)
        while done != list(self.prompts):
            room, call = self.chunk, []
            for row, prompt in enumerate(self.prompts):
                end = min(done[row] + room, prompt)
                call.append((done[row], end))
                room -= end - done[row]
                done[row] = end
            yield tuple(call)

    def places(self) -> Iterator[tuple[int, tuple[int, ...]]]:
        """For each step: new tokens per row, and where each row stands."""
        places = list(self.prompts)
        for query, advance in self.steps:
            yield query, tuple(places)
            places = [place + step for place, step in zip(places, advance, strict=True)]


def expected(engine: Engine, plan: Plan) -> torch.Tensor:
    """float32[rows, length, vocab]: all tokens of all rows in one call."""
    rows, length = len(plan.tokens), len(plan.tokens[0])
    decoder = Decoder(engine, rows)
    return decoder(0, torch.tensor(plan.tokens), [0] * rows, torch.arange(length).repeat(rows, 1))


def found(engine: Engine, plan: Plan, poison: float = 0.0) -> Iterator[tuple[str, int, int, torch.Tensor]]:
    """Yield kind of call, row, place and float32 logits [vocab] for every token that the plan has scored.

    The caches hold ``poison`` wherever nothing was written yet.
    """
    decoder = Decoder(engine, len(plan.tokens), poison)
    steps = list(plan.places())
    if is_paged(engine.contract):
        runs = list(plan.runs())
        for index, call in enumerate(runs):
            query, places = steps.pop(0) if steps and index == len(runs) - 1 else (0, (0,) * len(call))
            logits = decoder.packed(plan.tokens, call, query, places)
            if query:
                yield from _windows("packed", query, places, logits)
            else:
                yield from (("prefill", row, end - 1, logits[row, 0]) for row, (at, end) in enumerate(call) if end > at)
    else:
        for row, prompt in enumerate(plan.prompts):
            for start in range(0, prompt, plan.chunk):
                chunk = plan.tokens[row][start : min(start + plan.chunk, prompt)]
                last = len(chunk) - 1
                score = torch.full((1, prompt_rows(engine)), last)  # as it is served: what follows reads its caches
                for logits in decoder(row, torch.tensor([chunk]), [start], score)[0]:
                    yield "prefill", row, start + last, logits
    for query, places in steps:
        fed = [list(tokens[at : at + query]) for tokens, at in zip(plan.tokens, places, strict=True)]
        logits = decoder(0, torch.tensor(fed), list(places), torch.arange(query).repeat(len(fed), 1))
        yield from _windows("one" if query == 1 else "window", query, places, logits)


def _windows(
    kind: str, query: int, places: Sequence[int], logits: torch.Tensor
) -> Iterator[tuple[str, int, int, torch.Tensor]]:
    for row, at in enumerate(places):
        for index in range(query):
            yield kind, row, at + index, logits[row, index]


class Decoder:
    """An engine with caches of its own for ``rows`` rows."""

    def __init__(self, engine: Engine, rows: int, poison: float = 0.0) -> None:
        self._engine = engine
        self.cache = make_rows(engine, rows)
        for tensor in self.cache.tensors.values():
            tensor.fill_(poison)

    def __call__(self, first: int, tokens: torch.Tensor, index: list[int], score: torch.Tensor) -> torch.Tensor:
        """float32[batch, rows, vocab] on the host: logits of rows ``score`` for ``tokens`` of slots from ``first``."""
        given = {**windows(self._engine.contract, tokens, score), "write_index": torch.tensor(index)}
        return self._run(given, self.cache.rows(first, len(tokens)))

    def packed(
        self, texts: Sequence[Sequence[int]], runs: Sequence[tuple[int, int]], query: int, places: Sequence[int]
    ) -> torch.Tensor:
        """float32[slots, query, vocab] on the host: logits of windows of all slots, which stand at ``places``.

        In the same call each slot has a run of its text. Without windows (``query`` 0), the logits are those of the
        last token of every run, [slots, 1, vocab]. Padding stands behind the runs.
        """
        rows, counts = len(runs), torch.tensor([end - at for at, end in runs])
        ids = [token for text, at in zip(texts, places, strict=True) for token in text[at : at + query]]
        ids += [token for text, run in zip(texts, runs, strict=True) for token in text[slice(*run)]]
        padding = 0 if query else 1  # room that the windows leave
        ends = counts.cumsum(0)
        score = torch.arange(rows * query).view(rows, query) if query else (ends - 1).clamp(min=0)[:, None]
        bound = self.cache.rows(0, rows)
        given = {
            "token_ids": torch.tensor(ids + [0] * padding),
            "write_index": torch.tensor(places),
            "score_rows": score,
            "prompt_rows": torch.cat([torch.arange(rows).repeat_interleave(counts), torch.full((padding,), -1)]).int(),
            "prompt_starts": torch.cat([torch.zeros(1, dtype=torch.int64), ends]).int(),
            "prompt_index": torch.tensor([at for at, _ in runs]),
        }
        return self._run(given, {**bound, "prompt_table": bound["block_table"]})

    def _run(self, given: Mapping[str, torch.Tensor], cache: Mapping[str, torch.Tensor]) -> torch.Tensor:
        contract, device = self._engine.contract, self._engine.device
        shape = (*given["score_rows"].shape, logits_width(contract))
        logits = torch.full(shape, float("nan"), dtype=getattr(torch, contract["logits"].dtype), device=device)
        on_device = {name: tensor.to(device) for name, tensor in given.items()}
        self._engine.bind({**cache, **on_device, **with_states(contract, on_device), "logits": logits}).run()
        return logits.float().cpu()


def with_states(contract: Contract, given: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What targets and heads that draft from their states take and give beside tokens and logits.

    The state that a token is fed with follows from its id, so that it is the same in every call.
    """
    found = {}
    sizes = {"batch": given["score_rows"].shape[0], "rows": given["score_rows"].shape[1]}
    sizes |= dict(zip(("tokens",) if is_paged(contract) else ("batch", "query"), given["token_ids"].shape, strict=True))
    for binding in (*contract.inputs, *contract.outputs):
        if binding.name in ("states", "features", "next_states"):
            found[binding.name] = torch.zeros(
                binding.resolve(sizes), dtype=getattr(torch, binding.dtype), device=given["token_ids"].device
            )
    if "states" in found:
        wave = torch.arange(found["states"].shape[-1], device=found["states"].device)
        found["states"].copy_((given["token_ids"][..., None] + 1) * (wave + 1) % 97 / 48.5 - 1)
    return found


def is_decoder(contract: Contract) -> bool:
    """Whether an engine is a model: tokens in, logits out."""
    return any(binding.name == "token_ids" for binding in contract.inputs)


def make_rows(engine: Engine, rows: int) -> Cache:
    """A cache for ``rows`` rows of full length."""
    contract, device = engine.contract, engine.device
    if not is_paged(contract):
        return LinearCache(contract, rows, device)
    max_blocks = int(contract["block_table"].shape[1])
    table = BlockTable(rows, max_blocks, 1 + rows * max_blocks, device)
    for row in range(rows):
        table.reserve(row, max_blocks * BLOCK_SIZE)
    return PagedCache(contract, table, device)
