"""Answer a question with a JSON schema, with speculation and without, and print both."""

import json
import time
from typing import Any

import jsonschema
from rich.console import Console
from rich.markup import escape
from rich.panel import Panel

from tandemrt.engines.parameters.sampling import SamplingParams, StructuredOutputs
from tandemrt.runtime.llm.llm import LLM
from tandemrt.runtime.requests.request import RequestOutput

console = Console()


def answer(llm: LLM, question: str, schema: dict[str, Any], *, title: str, params: SamplingParams) -> bool:
    """Return whether the answer is valid and its text the same with speculation off."""
    params = params.model_copy(update={"structured_outputs": StructuredOutputs(json=schema)})
    drafted, seconds = _timed(llm, question, params)
    plain, autoregressive_seconds = _timed(llm, question, params.model_copy(update={"num_draft_tokens": 0}))
    valid, same = _is_valid(drafted.text, schema), drafted.token_ids == plain.token_ids
    console.print(Panel(escape(question), title=title, title_align="left"))
    if drafted.reasoning:
        console.print(f"[dim]{escape(drafted.reasoning.strip())}[/]", soft_wrap=True)
    console.print(escape(drafted.text.strip()), highlight=False, soft_wrap=True)
    facts = [
        _verdict(valid, "valid against its schema", "NOT valid against its schema"),
        _verdict(same, "same text with speculation off", "ANOTHER text with speculation off"),
        f"acceptance length {drafted.speculation.mean_acceptance_length:.2f}",
        f"{len(drafted.token_ids)} tokens in {1e3 * seconds:.0f} ms, {1e3 * autoregressive_seconds:.0f} ms without",
    ]
    if drafted.forced_ends:
        facts.append("the budget ended the reasoning")
    console.print("; ".join(facts), highlight=False, soft_wrap=True)
    console.print()
    return valid and same


def _timed(llm: LLM, question: str, params: SamplingParams) -> tuple[RequestOutput, float]:
    start = time.perf_counter()
    return llm.generate([{"role": "user", "content": question}], params), time.perf_counter() - start


def _is_valid(text: str, schema: dict[str, Any]) -> bool:
    try:
        jsonschema.validate(json.loads(text), schema)
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


def _verdict(good: bool, yes: str, no: str) -> str:
    return f"[green]{yes}[/]" if good else f"[red]{no}[/]"
