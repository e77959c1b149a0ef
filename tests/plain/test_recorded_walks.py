"""Random steps of objects that remember, such as queues, blocks, texts and constraints: all answers as recorded."""

import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain

import pytest

from tandemrt import SamplingParams
from tandemrt.engines.contract.contract import BLOCK_SIZE
from tandemrt.engines.validation.errors import TandemError
from tandemrt.runtime.caches.allocator import BlockAllocator
from tandemrt.runtime.constraints.thinking import ThinkingRule
from tandemrt.runtime.drafters.copy_source import CopySource
from tandemrt.runtime.engine_loop.draft_windows import DraftWindowPlanner
from tandemrt.runtime.metrics.metrics import Metrics
from tandemrt.runtime.requests.penalties import Penalties
from tandemrt.runtime.requests.request import Finish, Request
from tandemrt.runtime.requests.running import QueuedRequest, RunningRequest
from tandemrt.runtime.requests.text import TextStream
from tandemrt.runtime.servers.http.body import BodyBudget, BodyShare
from tandemrt.runtime.workers.clients import Client
from tandemrt.runtime.workers.fair import WorkerShares
from tests.plain.constraints import STOP, VOCABULARY, allowed, byte_tokens, constraint, json_grammar, regex_grammar
from tests.plain.requests import MANY, TOKENIZER, ids, make_queued, make_running
from tests.plain.test_constraint_properties import SCHEMA
from tests.plain.test_fair_queue import opened
from tests.recorded import require_recorded

Steps = Mapping[str, Callable[[], object]]  # each returns what it did and what shows then


def queue(draw: random.Random) -> Steps:
    names = [("", ""), ("a", ""), ("a", "x"), ("a", "y"), ("b", ""), ("", "x"), ("", "y")]
    clients = [Client(*each) for each in names]
    shares, working, work = WorkerShares[str](draw.randint(1, 4)), list[Client](), list[str]()

    def add(*, first: bool = False) -> object:
        client = draw.choice(clients)
        work.append(f"work {len(work)}")
        (shares.add_first if first else shares.add)(client, work[-1])
        return client, work[-1]

    def take() -> object:
        taken = shares.take()
        working.extend([] if taken is None else [taken[0]])
        return taken

    return {
        "add": add,
        "add another": add,
        "add first": lambda: add(first=True),
        "take": take,
        "done": lambda: shares.done(working.pop(draw.randrange(len(working)))) if working else None,
        "remove": lambda: shares.remove(draw.choice(work)) if work else None,
        "waiting": lambda: [len(shares), *map(shares.waiting, clients)],
        "clear": lambda: shares.clear() if draw.random() < 0.2 else None,
    }


def waiting(draw: random.Random) -> Steps:
    """Requests are named by the length of their prompt."""
    scheduler, slots = opened(draw.randint(1, 3), 6)
    sent = list[QueuedRequest]()

    def names(requests: Iterable[Request]) -> list[int]:
        return [len(each.prompt) for each in requests]

    def submit() -> object:
        client, user = draw.choice("aab"), draw.choice(["", "", "x"])
        new = [
            make_queued(prompt=[0] * (len(sent) + at), client=client, user=user) for at in range(1, draw.randint(2, 4))
        ]
        sent.extend(new)
        scheduler.submit(*new, block=False)
        return client, user, names(each.request for each in new)

    def join() -> object:
        tokens = draw.choice([MANY, 1, 40])
        return tokens, names(each.request for each in scheduler.join_ready(slots, tokens).joined), slots.missing_tokens

    def leave(*, preempts: bool = False) -> object:
        running = draw.choice([*slots])
        slots.leave(running.slot)
        if preempts:
            scheduler.preempt(running.preempt())
        return names([running.request])

    def drop() -> object:
        if draw.random() < 0.5:
            draw.choice(sent).request.cancel()
        dropped = scheduler.drop_queued(0.0)
        return [(*names([each.queued.request]), each.finish.reason) for each in dropped], scheduler.overdue()

    return {
        "submit": submit,
        "submit more": submit,
        "join": join,
        "leave": leave,
        "preempt": lambda: leave(preempts=True),
        "drop": drop,
        "count": lambda: (scheduler.waiting, scheduler.running, slots.free, scheduler.has_work(within=0.0)),
    }


def blocks(draw: random.Random) -> Steps:
    allocator, tokens = BlockAllocator(12), dict[int, int]()
    texts = [[bytes([start, at]) for at in range(5)] for start in (1, 2)]
    texts.append([*texts[0][:2], *texts[1][2:]])

    def allocate() -> object:
        row, wanted = draw.randrange(4), draw.randint(1, 5 * BLOCK_SIZE)
        wanted = max(wanted, tokens.get(row, 0))
        got = allocator.allocate(row, wanted, draw.choice(texts)[: wanted // BLOCK_SIZE])
        if got is not None:
            tokens[row] = wanted
        return row, wanted, got, allocator.available

    def register() -> object:
        row = draw.choice([*tokens])
        allocator.register_prefix(row, draw.choice(texts)[: tokens[row] // BLOCK_SIZE])
        return row, [*map(allocator.count_cached, texts)]

    def free() -> object:
        row = draw.randrange(4)
        allocator.free(row)
        return row, tokens.pop(row), [*map(allocator.num_blocks, range(4))]

    return {"allocate": allocate, "allocate another": allocate, "register": register, "free": free}


def bodies(draw: random.Random) -> Steps:
    budget = BodyBudget(100)
    shares = [BodyShare(budget, address) for address in ("a", "a", "b", "c")]

    def change(step: Callable[[BodyShare, int], None]) -> Callable[[], object]:
        def changed() -> object:
            step(draw.choice(shares), draw.randint(-9, 70))
            return [share.size for share in shares], budget.total

        return changed

    return {
        "take": change(lambda share, size: share.take(max(0, size))),
        "take an answer": change(lambda share, size: share.take_answer(max(0, size))),
        "keep": change(BodyShare.keep),
    }


def windows(draw: random.Random) -> Steps:
    table, missed_cost = draw.choice([None, 3, {1: 8, 3: 4}]), draw.choice([0.0, 0.5])
    planner = DraftWindowPlanner(table, 8, adaptive=True, missed_cost=missed_cost, token_cost=0.2)
    running = dict[int, RunningRequest]()

    def join() -> object:
        slot = draw.randrange(4)
        if slot not in running:
            running[slot] = make_running(slot=slot)
            planner.join(running[slot])
        return [*running]

    def leave() -> object:
        slot = draw.choice([*running])
        if draw.random() < 0.7:  # else it is preempted
            running[slot].request.finish(Finish("stop"))
        planner.leave(slot)
        del running[slot]
        return [*running]

    def draft() -> object:
        requests, missed = [running[slot] for slot in running], draw.choice([0, 0, 3, 40])
        batch = len(requests)
        window = planner.choose(requests, batch, prompts=draw.random() < 0.2, missed=missed) if batch else 0
        planner.costs.observe(batch, window, 0.01 * (1 + 0.1 * window + 0.02 * draw.random()))
        accepted = [draw.randint(window // 2, window) for _ in requests]
        for request, count in zip(requests, accepted, strict=True):
            planner.observe(request, count, window)
        planner.observe_round(batch, window, sum(accepted) / max(1, batch), missed=missed)
        return missed, window, accepted, f"{planner.least_gain(batch, window):.6f}"

    return {"join": join, "leave": leave, "draft": draft, "draft again": draft, "draft once more": draft}


def text(draw: random.Random) -> Steps:
    stops = draw.choice([[], ["lo"], ["lo e", "éé"]])
    stream, letters = TextStream(TOKENIZER, stops, include_stop=draw.random() < 0.5), ids("helo é")

    def add() -> object:
        kind, tokens = draw.choice(["reasoning", "answer", "answer", "delimiter"]), draw.choices(letters, k=3)
        ended = stream.add(kind, tokens, inner=draw.choice([(), (1,)]))
        return kind, tokens, ended, stream.tokens, stream.reasoning_tokens, stream.stopped_by

    return {"add": add, "take": stream.take, "text": lambda: (stream.text, stream.reasoning)}


def constrained(draw: random.Random) -> Steps:
    """Few letters, so that delimiters overlap with themselves, with each other and with the grammar's text."""
    letters = byte_tokens('ab{"')

    def some(least: int, most: int) -> tuple[int, ...]:
        return tuple(draw.choices(letters, k=draw.randint(least, most)))

    end = some(1, 3)
    forced, budget = (*some(0, 2), *end, *some(0, 2)), draw.choice([None, 0, 1, 2, 4])
    rule = ThinkingRule(some(1, 3), (end,), forced, (), budget, vocabulary=VOCABULARY)
    grammars = [None, json_grammar(SCHEMA), regex_grammar(r"a[ab]*b\{?")]
    state = constraint(grammar=draw.choice(grammars), thinking=rule, prompt=some(0, 6), min_tokens=draw.choice([0, 3]))

    def commit() -> object:
        ahead, tokens = state.fork(), list[int]()
        for _ in range(0 if state.finished else draw.randint(1, 3)):
            options = [each for each in letters if each in allowed(ahead)] or sorted(allowed(ahead))
            tokens.append(draw.choice(options))
            ahead.commit(tokens[-1:])
            if ahead.finished:
                break
        return tokens, state.commit(tokens), state.phase, state.undecided_span, state.finished

    return {
        "commit": commit,
        "commit another": commit,
        "limits": lambda: (state.reasoning_tokens, state.forced_ends, state.forced_end_spans, state.default_role),
        "forced": lambda: (state.fast_forward_tokens(4), state.may_fast_forward(2), STOP in allowed(state)),
    }


def adjusted(draw: random.Random) -> Steps:
    text = draw.choices(range(8), k=4)
    params = SamplingParams(
        presence_penalty=draw.choice([0.0, 0.5]),
        frequency_penalty=draw.choice([0.0, 0.25]),
        repetition_penalty=draw.choice([1.0, 1.5]),
        logit_bias=draw.choice([None, {3: 1.5, 70: -2.0}]),
    )
    penalties = Penalties([*text], params)

    def entries() -> object:
        columns, bias, *factors = penalties.entries(text, draw.choices(range(12), k=draw.randint(0, 3)))
        return text[-6:], columns.tolist(), bias.tolist(), factors

    return {"add": lambda: text.extend(draw.choices(range(100), k=draw.randint(1, 9))), "entries": entries}


def copies(draw: random.Random) -> Steps:
    source, tokens = CopySource(2, 6), [1, 2, 3, 4, 5, 1, 2, 3]

    def read() -> object:
        copied = source.copy(draw.randint(1, 6)).tokens
        tokens.extend([*copied[: draw.randint(0, 6)], *draw.choices(range(6), k=draw.randint(0, 2))])
        source.read(tokens, 6)
        return tokens[-8:]

    def copy() -> object:
        tokens, expected = source.copy(draw.randint(0, 6), draw.choices(range(6), k=draw.randint(0, 2)))
        return tokens, f"{expected:.6f}"

    return {"read": read, "copy": copy}


def counts(draw: random.Random) -> Steps:
    metrics = Metrics(accepted=[0] * 4)

    def count() -> object:
        metrics.accept(draw.randint(0, 4), draw.randint(1, 3))
        reason = draw.choice(["stop", "length"])
        metrics.finished[reason] = metrics.finished.get(reason, 0) + 1
        metrics.queue_seconds.observe(draw.random(), draw.randint(1, 3))
        metrics.rounds += draw.randint(0, 2)
        metrics.seconds["propose"] += draw.random()
        return f"{metrics.acceptance_length:.6f}", [f"{each:.6f}" for each in metrics.acceptance_per_position]

    def show() -> object:
        traffic = metrics.traffic
        numbers = traffic.rounds, traffic.steps, traffic.accepted, traffic.finished, traffic.queue_seconds.counts
        return numbers, {phase: f"{ms:.4f}" for phase, ms in traffic.host_ms_per_round.items()}

    return {"count": count, "show": show, "begin": lambda: metrics.begin_traffic() if draw.random() < 0.3 else None}


def walked(draw: random.Random, steps: Steps, count: int) -> Iterator[str]:
    for _ in range(count):
        name = draw.choice([*steps])
        try:
            yield f"{name} {steps[name]()}"
        except TandemError as error:
            yield f"{name} {type(error).__name__}: {error}"
        except LookupError:  # there is nothing to choose from
            yield f"{name} of nothing"


STARTS = [queue, waiting, blocks, bodies, windows, text, constrained, adjusted, copies, counts]


@pytest.mark.parametrize("start", STARTS)
def test_every_step_answers_as_before(start: Callable[[random.Random], Steps]) -> None:
    walks = (walked(draw, start(draw), 60) for draw in map(random.Random, range(20)))
    require_recorded(f"walk/{start.__name__}", chain.from_iterable(walks))
