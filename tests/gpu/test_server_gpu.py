"""``tandemrt serve`` on a CUDA device, with OpenAI's client: streams, many clients, a client that leaves."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tandemrt import SamplingParams, StructuredOutputs
from tandemrt.engines.options.options import RuntimeOptions
from tandemrt.engines.recipe.recipe import Recipe
from tandemrt.export.bundle.build import build
from tests.waiting import PATIENCE_S, eventually
from tools.demo.corpus import held_out

openai = pytest.importorskip("openai")
_NEEDS = {"exc_type": ImportError, "reason": "needs the packages of the extra serve: pip install '.[serve]'"}
client, config, conftest = (
    pytest.importorskip(name, **_NEEDS)
    for name in ("tests.openai.client", "tandemrt.runtime.servers.http.config", "tests.openai.conftest")
)

ROOT = Path(__file__).parents[2]
CLIENTS = 64

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    recipe = Recipe.load(ROOT / "engines/recipes/demo.toml", backend="onnxruntime-cuda", dtype="float16")
    bundle = build(recipe, tmp_path_factory.mktemp("demo") / "bundle").folder
    with conftest.serving(bundle, config.ServerConfig(port=0, grace_s=10), RuntimeOptions()) as running:
        yield running


def test_64_clients_stream_the_texts_of_the_python_api(served: Any) -> None:
    llm, examples = served.llm, held_out(CLIENTS)
    params = [
        SamplingParams(seed=seed, structured_outputs=StructuredOutputs(json=example.schema))
        for seed, example in enumerate(examples)
    ]
    expected = [
        llm.generate(example.prompt_messages(), each).text for example, each in zip(examples, params, strict=True)
    ]

    async def read(opened: Any, at: int) -> str:
        stream = await opened.chat.completions.create(**client.asking(examples[at], seed=at, stream=True))
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def read_all() -> list[str]:
        async with openai.AsyncOpenAI(base_url=served.url, api_key="none", max_retries=0, timeout=PATIENCE_S) as opened:
            return await asyncio.gather(*(read(opened, at) for at in range(CLIENTS)))

    assert asyncio.run(read_all()) == expected
    assert (llm.running, llm.waiting) == (0, 0)
    assert llm.metrics.graph_replays > 0
    assert set(llm.metrics.eager_runs) <= {"prompts"}


def test_a_client_that_leaves_frees_its_slot_and_others_go_on(served: Any) -> None:
    llm, endless = served.llm, {"model": "demo", "prompt": "Please send", "extra_body": {"ignore_eos": True}}
    with openai.OpenAI(base_url=served.url, api_key="none", max_retries=0, timeout=PATIENCE_S) as opened:
        whole = opened.completions.create(**endless, seed=1, max_tokens=60).choices[0].text
        others = [opened.completions.create(**endless, seed=1, max_tokens=60, stream=True)]
        with opened.completions.create(**endless, seed=2, stream=True) as leaving:
            assert next(iter(leaving)).choices[0].text
            others.append(opened.completions.create(**endless, seed=1, max_tokens=60, stream=True))
        cancelled = llm.metrics.finished.get("cancelled", 0)
        assert eventually(lambda: llm.metrics.finished.get("cancelled", 0) > cancelled or not llm.running)
        for stream in others:
            assert "".join(chunk.choices[0].text for chunk in stream) == whole
    assert eventually(lambda: (llm.running, llm.waiting) == (0, 0))
    assert llm.metrics.finished.get("cancelled", 0) >= 1
