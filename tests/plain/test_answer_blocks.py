"""The blocks of an answer: nothing is lost or repeated, wherever its stream is cut and however it ends."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from tandemrt.runtime.servers.openai.answer import AnswerBlocks, BlockDelta
from tandemrt.runtime.servers.openai.protocol import Function
from tandemrt.runtime.servers.openai.tools import ToolCallSpec
from tests.plain.test_openai_choices import delta_of, output_of
from tests.plain.tool_call_templates import HERMES, begin_of

SPEC = ToolCallSpec([Function(name="get")], format=HERMES)
BEGIN = begin_of(HERMES, "get")
CALL = BEGIN + "{}" + HERMES.last


@given(
    st.lists(st.sampled_from(["Two boxes. ", CALL, BEGIN[:3], "<"]), max_size=4).map("".join),
    st.integers(0, len(BEGIN)),
    st.lists(st.integers(0, 200), max_size=5),
    st.booleans(),
)
def test_the_deltas_of_blocks_join_to_their_texts(text: str, begun: int, cuts: list[int], empty_end: bool) -> None:
    """A text may end in the beginning of a call, which is held back until the end."""
    text += BEGIN[:begun] if begun < len(BEGIN) else ""
    bounds = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    parts = [text[start:end] for start, end in pairwise(bounds)]
    if empty_end or not parts:
        parts.append("")
    whole, streamed = AnswerBlocks(SPEC), AnswerBlocks(SPEC)
    [*whole.feed(delta_of(text, output_of(text)))]
    events: list[BlockDelta] = []
    for at, part in enumerate(parts):
        events += streamed.feed(delta_of(part, output_of(text) if at == len(parts) - 1 else None))

    def content(blocks: AnswerBlocks) -> list[tuple[str, str]]:
        return [(block.kind, block.text) for block in blocks.blocks]

    assert content(streamed) == content(whole)
    assert [event.block.index for event in events if event.begins] == [*range(len(whole.blocks))]
    assert [event.block.index for event in events if event.ends] == [*range(len(whole.blocks))]
    for block in streamed.blocks:
        assert "".join(event.text for event in events if event.block is block) == block.text


def test_text_that_was_held_for_a_call_is_released_at_the_end() -> None:
    for begun in range(1, BEGIN.index(">") + 1):  # up to the tag that begins a call
        text = "Two boxes. " + BEGIN[:begun]
        blocks = AnswerBlocks(SPEC)
        [*blocks.feed(delta_of(text))]
        [*blocks.feed(delta_of("", output_of(text, finish_reason="length")))]
        assert [(block.kind, block.text) for block in blocks.blocks] == [("text", text)]
