"""An answer in the terminal: all of its text, once, with drafted characters marked."""

from itertools import accumulate

from hypothesis import given, settings
from hypothesis import strategies as st

from tandemrt import StreamOutput
from tandemrt.runtime.cli.answer import DraftedText, wrapped
from tandemrt.runtime.requests.request import Finish
from tandemrt.runtime.requests.trace import RequestTrace
from tests.plain.requests import TOKENIZER, ids, make_running
from tests.plain.test_trace import one_round

texts = st.text(st.sampled_from("ab é日本\n<"), max_size=6)


@settings(max_examples=60)
@given(reasoning=texts, answer=texts, windows=st.lists(st.integers(1, 5), min_size=40, max_size=40))
def test_a_character_is_drafted_if_its_last_token_was(reasoning: str, answer: str, windows: list[int]) -> None:
    items: list[StreamOutput] = []
    running = make_running(items.append, prompt=ids("<think>"), thinking=True)
    running.request.trace = RequestTrace()
    spans = DraftedText(TOKENIZER, running.request)
    tokens, drafted = ids(f"{reasoning}</think>{answer}"), []
    for size in windows:
        begin = len(drafted)
        emitted = tokens[begin : begin + size]
        if emitted:
            one_round(running, emitted[:-1], emitted)
            drafted += [True] * (len(emitted) - 1) + [False]
            running.notify()
    running.finish(Finish("cancelled"))
    running.notify()

    said = [each for item in items for each in spans.spans(item)]
    for kind, text, first in (("reasoning", reasoning, 0), ("answer", answer, len(ids(f"{reasoning}</think>")))):
        marked = [(character, each.drafted) for each in said if each.kind == kind for character in each.text]
        ends = accumulate(len(character.encode()) for character in text)
        assert marked == [(character, drafted[first + end - 1]) for character, end in zip(text, ends, strict=True)]


def test_a_line_of_figures_breaks_between_facts_only() -> None:
    facts = "81 tokens in 0.19 s, 432.9 tokens/s, 4.50 tokens per round, finish: stop, seed: 10644134394369402367"
    assert wrapped(facts, 80).splitlines() == [
        "81 tokens in 0.19 s, 432.9 tokens/s, 4.50 tokens per round, finish: stop,",
        "seed: 10644134394369402367",
    ]
    assert wrapped(facts, 200) == facts
