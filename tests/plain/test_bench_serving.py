"""The load generator: its prompts, the times of its requests, and its figures."""

import asyncio
import json
from base64 import b64decode
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tandemrt.engines.validation.errors import BadRequest
from tools.bench.serving.load import figures
from tools.bench.serving.pace import Closed, Open
from tools.bench.serving.prompts import prompts
from tools.bench.serving.streamed import Streamed

QUESTION = {"messages": [{"role": "user", "content": "Why?"}]}
ROWS: dict[str, Any] = {
    "a prompt": ({"prompt": "Why?"}, {"prompt": "Why?"}),
    "messages": (QUESTION, QUESTION),
    "SPEED-Bench": ({"category": "math", "turns": ["Why?", "And then?"]}, QUESTION),
    "ShareGPT": (
        {"conversations": [{"from": "gpt", "value": "Hi"}, {"from": "human", "value": "Why?"}]},
        QUESTION,
    ),
}


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("as_lines", [False, True])
def test_files_of_other_benchmarks_are_read(tmp_path: Path, name: str, as_lines: bool) -> None:
    row, wanted = ROWS[name]
    other = {"prompt": "Another"}
    text = "\n".join(map(json.dumps, [row, other])) if as_lines else json.dumps([row, other])
    (tmp_path / "file.json").write_text(text)
    assert prompts(str(tmp_path / "file.json"), 3, 0) == [wanted, other, wanted]


@pytest.mark.parametrize("row", [{"turns": []}, {"conversations": "Hi"}, {}, 3])
def test_a_row_without_a_question_is_rejected_with_its_place(tmp_path: Path, row: Any) -> None:
    (tmp_path / "file.jsonl").write_text(f"{json.dumps({'prompt': 'x'})}\n{json.dumps(row)}")
    with pytest.raises(BadRequest, match=r"a row must have prompt, messages, turns or conversations.*row 2 of"):
        prompts(str(tmp_path / "file.jsonl"), 2, 0)


def test_conversations_without_a_question_are_left_out(tmp_path: Path) -> None:
    answers = [{"conversations": []}, {"conversations": [{"from": "gpt", "value": "Hi"}]}]
    (tmp_path / "file.json").write_text(json.dumps([*answers, {"prompt": "x"}]))
    assert prompts(str(tmp_path / "file.json"), 2, 0) == [{"prompt": "x"}] * 2


@pytest.mark.parametrize(
    ("text", "problem"),
    [("", "one prompt"), ('[{"conversations": []}]', "one question"), ("{", "a JSON list or JSON lines")],
)
def test_a_file_without_prompts_is_rejected(tmp_path: Path, text: str, problem: str) -> None:
    (tmp_path / "file.json").write_text(text)
    with pytest.raises(BadRequest, match=problem):
        prompts(str(tmp_path / "file.json"), 1, 0)


def test_random_prompts_differ_and_repeat_by_seed() -> None:
    first, second = prompts("random:1000", 2, 5)
    assert len(first["prompt"]) == len(second["prompt"]) == 1000
    assert first != second
    assert prompts("random:1000", 2, 5) == [first, second]
    assert prompts("random:1000", 2, 6) != [first, second]


def test_image_prompts_differ_and_repeat_by_seed() -> None:
    first, second = prompts("image:40", 2, 5)
    image, question = first["messages"][0]["content"]
    data = image["image_url"]["url"].removeprefix("data:image/png;base64,")
    assert Image.open(BytesIO(b64decode(data))).size == (40, 40)
    assert question["type"] == "text"
    assert first != second
    assert prompts("image:40", 2, 5) == [first, second]
    with pytest.raises(BadRequest, match="image: must be followed by a number of pixels, received 'x'"):
        prompts("image:x", 1, 5)


def test_clients_of_a_closed_loop_send_one_request_at_a_time() -> None:
    running, most, begun = 0, 0, []

    async def send(item: int) -> int:
        nonlocal running, most
        running += 1
        most = max(most, running)
        begun.append(item)
        await asyncio.sleep(0)
        running -= 1
        return item

    assert sorted(asyncio.run(Closed(3).run(send, range(10)))) == begun == list(range(10))
    assert most == 3


def test_an_open_loop_does_not_wait_for_answers() -> None:
    """All requests are in flight before the first is answered."""
    begun: list[int] = []

    async def run() -> list[int]:
        all_sent = asyncio.Event()

        async def send(item: int) -> int:
            begun.append(item)
            if len(begun) == 5:
                all_sent.set()
            await all_sent.wait()
            return item

        return await Open(10_000.0).run(send, range(5))

    assert asyncio.run(run()) == begun == list(range(5))


def answer(sent: float, *chunks: float, tokens: int = 0, rounds: int | None = None, accepted: int = 0) -> Streamed:
    return Streamed(sent, list(chunks), output_tokens=tokens, rounds=rounds, accepted=accepted)


def test_figures() -> None:
    answers = [
        answer(0.0, 0.1, 0.2, 0.4, tokens=7, rounds=2, accepted=5),
        answer(1.0, 1.3, tokens=1),
        Streamed(2.0, error="500"),
    ]
    measured = figures(answers, 4.0)
    assert measured[:3] == (3, 1, 2.0)
    assert measured[3:6] == pytest.approx((200, 280, 298))  # of 100 and 300 ms
    assert measured[6:] == pytest.approx((25, 150, 190, 199, 3.5))  # 300 ms / 6 tokens, 0; gaps of 100 and 200


def test_nothing_to_measure_is_no_figure() -> None:
    assert figures([Streamed(0.0, error="refused")], 1.0) == (1, 1, 0.0, *[None] * 8)
