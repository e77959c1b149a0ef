"""Agents that send tools and an output schema in one request get an answer that obeys the schema."""

import pytest

from tests.clients.conftest import Ask
from tests.clients.test_instructor import ORDER


@pytest.mark.parametrize("agent", ["langchain", "openai-agents chat", "openai-agents responses"])
def test_an_agent_with_a_tool_gets_an_object(ask: Ask, agent: str) -> None:
    assert ask("ask_agents.py", agent) == ORDER
