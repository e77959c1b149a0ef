"""The clients in docs/serving.md print what the Python API answers."""

import re
from pathlib import Path

import pytest

from tandemrt import LLM, SamplingParams
from tools.serve import TritonServer

PAGE = Path(__file__).parents[2] / "docs" / "serving.md"
CLIENTS = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("code", CLIENTS, ids=["http", "grpc"])
def test_a_documented_client_prints_the_answer(
    server: TritonServer, llm: LLM, capsys: pytest.CaptureFixture[str], code: str
) -> None:
    here = code.replace(":8000/", f":{server.http}/").replace(":8001", f":{server.grpc}")
    assert here != code
    exec(compile(here, str(PAGE), "exec"), {})  # noqa: S102  # our own page
    messages = [{"role": "user", "content": "Please put 1 pine box at £26.55 on the account of Leo Conti."}]
    expected = llm.generate(messages, SamplingParams(seed=1, thinking_token_budget=64))
    assert expected.text
    assert capsys.readouterr().out.rstrip("\n") == expected.text.rstrip("\n")
