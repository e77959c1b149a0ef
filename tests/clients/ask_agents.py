"""Ask a server for a pydantic model through an agent with a tool, in an environment of its own. Prints JSON."""

import asyncio
import json
import sys
from typing import Literal

from pydantic import BaseModel

SENTENCE = "Please put 1 pine box at £26.55 on the account of Leo Conti."


class Order(BaseModel):
    kind: Literal["order"]
    customer: str
    currency: Literal["EUR", "USD", "GBP"]


def stock(item: str) -> str:
    """Return how many pieces of an item there are."""
    return f"3 of {item}"


def langchain(url: str) -> Order:
    from langchain.agents import create_agent
    from langchain.agents.structured_output import ProviderStrategy
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(base_url=url, api_key="none", model="demo", temperature=0, max_retries=0)
    agent = create_agent(model, tools=[stock], response_format=ProviderStrategy(Order))
    answer = agent.invoke({"messages": [{"role": "user", "content": SENTENCE}]})
    return answer["structured_response"]


def openai_agents(url: str, *, chat: bool) -> Order:
    import agents
    from openai import AsyncOpenAI

    agents.set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=url, api_key="none", max_retries=0)
    kind = agents.OpenAIChatCompletionsModel if chat else agents.OpenAIResponsesModel
    agent = agents.Agent(
        name="clerk",
        model=kind("demo", client),
        model_settings=agents.ModelSettings(temperature=0),
        tools=[agents.function_tool(stock)],
        output_type=Order,
    )
    return asyncio.run(agents.Runner.run(agent, SENTENCE)).final_output


AGENTS = {
    "langchain": langchain,
    "openai-agents chat": lambda url: openai_agents(url, chat=True),
    "openai-agents responses": lambda url: openai_agents(url, chat=False),
}


def main(url: str, name: str) -> None:
    print(json.dumps(AGENTS[name](url).model_dump()))


main(*sys.argv[1:])
