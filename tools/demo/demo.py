"""The demo: answer held-out sentences and show that speculation changes nothing but the speed.

tandemrt export build demo --out engines/built/demo
python -m tools.demo.demo engines/built/demo
"""

import json
import sys
import time
from pathlib import Path
from typing import Annotated

import jsonschema
import typer
from rich.console import Console
from rich.markup import escape
from rich.panel import Panel

from tandemrt.engines.parameters.sampling import SamplingParams, StructuredOutputs
from tandemrt.runtime.llm.llm import LLM
from tandemrt.runtime.requests.request import RequestOutput
from tools.demo.corpus import Example, held_out

console = Console()


def main(
    bundle: Annotated[Path, typer.Argument(help="The demo's bundle.")],
) -> None:
    """Answer three held-out sentences, and one of them with a thinking budget."""
    kinds = ("order", "appointment", "contact")
    examples = [next(e for e in held_out(100) if e.kind == kind) for kind in kinds]
    with LLM(bundle) as llm:
        for window in (None, 0):  # the first run of each kind allocates and compiles
            llm.generate(
                examples[0].prompt_messages(), SamplingParams(temperature=0.0, num_draft_tokens=window, max_tokens=8)
            )
        good = [answer(llm, example, budget=None) for example in examples]
        good.append(answer(llm, examples[0], budget=24))
    if not all(good):
        console.print("[red]an answer was not valid, or speculation changed the text[/]")
        sys.exit(1)


def answer(llm: LLM, example: Example, *, budget: int | None) -> bool:
    """Answer one sentence with speculation and without, and print both; return whether the texts are equal."""
    params = SamplingParams(
        temperature=0.0,
        seed=1,
        thinking_token_budget=budget,
        structured_outputs=StructuredOutputs(json=example.schema),
    )
    spoken, seconds = _timed(llm, example, params)
    plain, autoregressive_seconds = _timed(llm, example, params.model_copy(update={"num_draft_tokens": 0}))
    valid, same = _is_valid(spoken.text, example), spoken.token_ids == plain.token_ids
    title = f"{example.kind}" + (f", thinking budget {budget}" if budget is not None else "")
    console.print(Panel(escape(example.sentence), title=title, title_align="left"))
    console.print(f"[dim]{escape(spoken.reasoning.strip())}[/]", soft_wrap=True)
    console.print(escape(spoken.text.strip()), highlight=False, soft_wrap=True)
    facts = [
        _verdict(valid, "valid against its schema", "NOT valid against its schema"),
        _verdict(same, "same text with speculation off", "ANOTHER text with speculation off"),
        f"acceptance length {spoken.speculation.mean_acceptance_length:.2f}",
        f"{len(spoken.token_ids)} tokens in {1e3 * seconds:.0f} ms, {1e3 * autoregressive_seconds:.0f} ms without",
    ]
    if spoken.forced_ends:
        facts.append("the budget ended the reasoning")
    console.print("; ".join(facts), highlight=False, soft_wrap=True)
    console.print()
    return valid and same


def _timed(llm: LLM, example: Example, params: SamplingParams) -> tuple[RequestOutput, float]:
    start = time.perf_counter()
    return llm.generate(example.prompt_messages(), params), time.perf_counter() - start


def _is_valid(text: str, example: Example) -> bool:
    try:
        jsonschema.validate(json.loads(text), example.schema)
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


def _verdict(good: bool, yes: str, no: str) -> str:
    return f"[green]{yes}[/]" if good else f"[red]{no}[/]"


if __name__ == "__main__":
    typer.run(main)
