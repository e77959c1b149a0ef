"""The demo: answer held-out sentences and show that speculation changes nothing but the speed.

tandemrt export build demo --out engines/built/demo
python -m tools.demo.demo engines/built/demo
"""

import sys
from pathlib import Path
from typing import Annotated

import typer

from tandemrt.engines.parameters.sampling import SamplingParams
from tandemrt.runtime.llm.llm import LLM
from tools.demo.corpus import held_out
from tools.demo.shown import answer, console


def main(
    bundle: Annotated[Path, typer.Argument(help="The demo's bundle.")],
) -> None:
    """Answer three held-out sentences, and one of them with a thinking budget."""
    kinds = ("order", "appointment", "contact")
    examples = [next(e for e in held_out(100) if e.kind == kind) for kind in kinds]
    asked = [(example, None) for example in examples] + [(examples[0], 24)]
    with LLM(bundle) as llm:
        for window in (None, 0):  # the first run of each kind allocates and compiles
            llm.generate(
                examples[0].prompt_messages(), SamplingParams(temperature=0.0, num_draft_tokens=window, max_tokens=8)
            )
        good = [
            answer(
                llm,
                example.sentence,
                example.schema,
                title=example.kind if budget is None else f"{example.kind}, thinking budget {budget}",
                params=SamplingParams(temperature=0.0, seed=1, thinking_token_budget=budget),
            )
            for example, budget in asked
        ]
    if not all(good):
        console.print("[red]an answer was not valid, or speculation changed the text[/]")
        sys.exit(1)


if __name__ == "__main__":
    typer.run(main)
