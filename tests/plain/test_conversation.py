"""An answer as a terminal shows it: all of its text, once, and which characters were drafted."""

from itertools import accumulate

from hypothesis import given, settings
from hypothesis import strategies as st

from tandemrt import StreamOutput
from tandemrt.runtime.cli.conversation import Marks
from tandemrt.runtime.trace.trace import Trace
from tests.plain.requests import TOKENIZER, ids, make_running
from tests.plain.test_trace import one_round

texts = st.text(st.sampled_from("ab é日本\n<"), max_size=6)


@settings(max_examples=60)
@given(reasoning=texts, answer=texts, windows=st.lists(st.integers(1, 5), min_size=40, max_size=40))
def test_every_character_is_marked_as_its_last_token_was_drafted(
    reasoning: str, answer: str, windows: list[int]
) -> None:
    items: list[StreamOutput] = []
    running = make_running(items.append, prompt=ids("<think>"), thinking=True)
    running.request.trace = Trace()
    marks = Marks(TOKENIZER, running.request)
    tokens, drafted = ids(f"{reasoning}</think>{answer}"), []
    for size in windows:
        begin = len(drafted)
        emitted = tokens[begin : begin + size]
        if emitted:
            one_round(running, emitted[:-1], emitted)
            drafted += [True] * (len(emitted) - 1) + [False]
            running.tell()
    running.finish("cancelled")
    running.tell()

    said = [each for item in items for each in marks.take(item)]
    for kind, text, first in (("reasoning", reasoning, 0), ("answer", answer, len(ids(f"{reasoning}</think>")))):
        marked = [(character, each.drafted) for each in said if each.kind == kind for character in each.text]
        ends = accumulate(len(character.encode()) for character in text)
        assert marked == [(character, drafted[first + end - 1]) for character, end in zip(text, ends, strict=True)]
