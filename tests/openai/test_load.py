"""Many clients at once: each gets the text that it would get alone."""

import asyncio

import openai

from tandemrt import LLM, SamplingParams, StructuredOutputs
from tests.openai.client import Served, asking
from tests.waiting import PATIENCE_S
from tools.demo.corpus import held_out

STREAMS = 32


def test_concurrent_streams_equal_the_python_api(served: Served, llm: LLM) -> None:
    examples = held_out(STREAMS)
    prompts = [example.prompt_messages() for example in examples]
    params = [
        SamplingParams(seed=seed, structured_outputs=StructuredOutputs(json=example.schema))
        for seed, example in enumerate(examples)
    ]
    expected = llm.generate(prompts, params)

    async def read(client: openai.AsyncOpenAI, at: int) -> str:
        stream = await client.chat.completions.create(**asking(examples[at], seed=at, stream=True))
        chunks = [chunk.choices[0] async for chunk in stream]
        assert chunks[-1].finish_reason == expected[at].finish_reason
        return "".join(choice.delta.content or "" for choice in chunks)

    async def read_all() -> list[str]:
        async with openai.AsyncOpenAI(base_url=served.url, api_key="none", max_retries=0, timeout=PATIENCE_S) as client:
            return await asyncio.gather(*(read(client, at) for at in range(STREAMS)))

    assert asyncio.run(read_all()) == [output.text for output in expected]
    assert (llm.running, llm.waiting) == (0, 0)
