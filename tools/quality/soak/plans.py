"""Random requests and attempts, drawn from a seed so that a run can be repeated."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, Literal

from tandemrt.engines.parameters.sampling import SamplingParams, StructuredOutputs
from tandemrt.runtime.requests.prompt import Message
from tools.quality.soak.models import LENGTH, WORDS

Way = Literal["generate", "stream", "listen"]
Prompt = str | Sequence[int] | Sequence[Message]


@dataclass(frozen=True)
class Plan:
    """A request: its prompt and its sampling parameters."""

    prompt: Prompt
    params: SamplingParams


@dataclass(frozen=True)
class Attempt:
    """One submission of a plan.

    Attributes:
        plan: index of the plan.
        way: how it is submitted.
        cancel_after: the client cancels after this many tokens; None for never.
        timeout_s: the deadline in seconds; None for none.
        fault: the kind of the injected fault (see ``faults.KINDS``); None for none.
        fault_at: the number of the call that fails, from 0.
    """

    plan: int
    way: Way
    cancel_after: int | None = None
    timeout_s: float | None = None
    fault: str | None = None
    fault_at: int = 0


@dataclass(frozen=True)
class Wave:
    """Attempts that several clients send to one LLM.

    Attributes:
        number: the number of the wave, from 0.
        first: the number of its first request, from 0.
        attempts: what the clients send one after another.
        flood: what is sent at once after that, followed by a request that fits no engine; empty for no flood.
        refused_threads: the LLM is opened again first, and this many of its threads are refused; None to keep it open.
    """

    number: int
    first: int
    attempts: list[Attempt]
    flood: list[Attempt]
    refused_threads: int | None

    @property
    def requests(self) -> int:
        return len(self.attempts) + (len(self.flood) + TOO_LARGE if self.flood else 0)


ATTEMPTS = 50  # of a wave
FLOOD = 30
TOO_LARGE = 1  # request of a flood that fits no engine
WHOLE = ATTEMPTS + FLOOD + TOO_LARGE  # requests of every wave but the last ones of a limited run
REOPEN_EVERY = 6  # waves of one LLM
_LONG = LENGTH - 45  # output tokens; several such requests at once outgrow the small paged cache
_SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}, "ok": {"type": "boolean"}},
    "required": ["n", "ok"],
    "additionalProperties": False,
}
_STRUCTURES: list[dict[str, Any]] = [
    {"regex": "[a-c]{2,9}"},
    {"choice": ["yes", "no", "perhaps not"]},
    {"json": _SCHEMA, "whitespace": "compact"},
    {"json": _SCHEMA, "validate_output": True},
    {"json_object": True},
    {"grammar": 'root ::= "[" [0-9]+ ("," [0-9]+){0,4} "]"'},
]
_CONSTRAINTS: list[dict[str, Any]] = [
    {},
    {"stop": ["e", "th", "un"]},
    {"stop": ["a"], "include_stop_str_in_output": True, "ignore_eos": True},
    {"thinking_token_budget": 3},
    {"thinking_token_budget": 0},
    {"allowed_token_ids": [70, 71, 72], "min_tokens": 2},
    {"banned_token_ids": [10, 11, 12], "ignore_eos": True, "stop_token_ids": [5, 6, 7, 8]},
]
_PENALTIES: list[dict[str, Any]] = [
    {},
    {},
    {"repetition_penalty": 1.3},
    {"presence_penalty": 0.5, "frequency_penalty": 0.7},
    {"logit_bias": {40: 3.0, 41: -100.0}},
]
_FILTERS: list[dict[str, Any]] = [
    {},
    {},
    {"top_k": 5},
    {"top_p": 0.8},
    {"min_p": 0.1},
    {"top_n_sigma": 1.2},
    {"top_k": 20, "top_p": 0.9},
]


def draw_plans(draw: Random, count: int) -> list[Plan]:
    """Draw ``count`` plans. Every second has a structured output; one in six samples by rejection."""
    return [_plan(draw, structured=index % 2 == 1) for index in range(count)]


def draw_waves(
    draw: Random, plans: list[Plan], faults: tuple[str, ...], llms: int, requests: int | None
) -> Iterator[Wave]:
    """Draw waves for ``llms`` LLMs in turn, until ``requests`` requests; without end for None."""
    number = first = 0
    while requests is None or first < requests:
        turn = number // llms
        refused = None
        if turn % REOPEN_EVERY == REOPEN_EVERY - 1:
            refused = draw.choice([1, 2, 3]) if "thread" in faults else 0
        whole = requests is None or requests - first >= WHOLE
        size = ATTEMPTS if requests is None else min(ATTEMPTS, requests - first)
        attempts = [draw_attempt(draw, plans, faults, close_streams=turn % 2 == 1) for _ in range(size)]
        wave = Wave(number, first, attempts, attempts[:FLOOD] if whole else [], refused)
        yield wave
        number, first = number + 1, first + wave.requests


def draw_attempt(draw: Random, plans: list[Plan], faults: tuple[str, ...], *, close_streams: bool) -> Attempt:
    """Draw an attempt: one in ten has a fault, a quarter is cancelled or times out, the rest runs to its end.

    ``close_streams``: some clients close their stream early. Their finish reasons are unknown, so without it the
    counters are checked exactly.
    """
    plan, chance = draw.randrange(len(plans)), draw.random()
    if faults and chance < 0.1:
        fault = draw.choice(faults)
        if fault in ("grammar", "compiler"):  # these faults need a grammar
            plan |= 1
        while fault == "draft-nan" and plans[plan].params.rule == "rejection":  # its text may depend on the draft
            plan = draw.randrange(len(plans))
        return Attempt(plan, "listen", fault=fault, fault_at=draw.choice([0, 1, 2, 5]))
    if chance < 0.25:
        return Attempt(
            plan,
            draw.choice(["stream", "listen"] if close_streams else ["listen"]),
            cancel_after=draw.choice([0, 1, 2, 7, 20]),
        )
    if chance < 0.35:
        return Attempt(
            plan, draw.choice(["generate", "stream", "listen"]), timeout_s=draw.choice([0.001, 0.01, 0.05, 0.2])
        )
    return Attempt(plan, draw.choice(["generate", "stream", "listen"]))


def _plan(draw: Random, *, structured: bool) -> Plan:
    length = draw.choice([1, 2, 15, 17, 40])
    ids = [draw.randrange(WORDS) for _ in range(length)]
    chat = [{"role": "user", "content": "".join(draw.choices("etaoin ", k=length))}]
    prompts: list[Prompt] = [ids, ids, "".join(draw.choices("shrdlu ", k=length)), chat]
    more = {"structured_outputs": StructuredOutputs(**draw.choice(_STRUCTURES))} if structured else {}
    params = SamplingParams(
        temperature=draw.choice([0.0, 0.7, 1.0, 1.5]),
        seed=draw.randrange(2**64),
        max_tokens=draw.choice([2, 5, 20, _LONG, _LONG, _LONG]),
        num_draft_tokens=draw.choice([None, None, 0, 1, 3]),
        rule=draw.choice(["coupled"] * 5 + ["rejection"]),
        **draw.choice(_PENALTIES),
        **draw.choice(_FILTERS),
        **(more or draw.choice(_CONSTRAINTS)),
    )
    return Plan(draw.choice(prompts), params)
