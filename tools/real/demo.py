"""Answer with a JSON schema, with speculation and without, by a trained model.

make real
"""

import json
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import jsonschema
import typer
from rich.console import Console
from rich.markup import escape
from rich.panel import Panel

from tandemrt import LLM, RequestOutput, SamplingParams, StructuredOutputs

SENTENCE = (
    "List these cities with country and population in millions: Paris (France, 2.1), Rome (Italy, 2.8), Madrid "
    "(Spain, 3.3). Answer with JSON."
)
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "cities": {
            "type": "array",
            "minItems": 3,
            "maxItems": 3,
            "items": {
                "type": "object",
                "properties": {
                    "name": {"enum": ["Paris", "Rome", "Madrid"]},
                    "country": {"enum": ["France", "Italy", "Spain"]},
                    "millions": {"type": "number", "minimum": 0, "maximum": 40},
                },
                "required": ["name", "country", "millions"],
                "additionalProperties": False,
            },
        }
    },
    "required": ["cities"],
    "additionalProperties": False,
}

console = Console()


def main(bundle: Annotated[Path, typer.Argument(help="The bundle of tools/real/recipe.toml.")]) -> None:
    """Answer twice; the exit code is 1 if the answer is invalid or if speculation changed it."""
    with LLM(bundle) as llm:
        for window in (None, 0):  # the first run of each kind allocates and compiles
            ask(llm, window)
        (drafted, seconds), (plain, autoregressive_seconds) = ask(llm, None), ask(llm, 0)
    console.print(Panel(escape(SENTENCE), title="SmolLM2-135M-Instruct", title_align="left"))
    console.print(escape(drafted.text.strip()), highlight=False, soft_wrap=True)
    jsonschema.validate(json.loads(drafted.text), SCHEMA)
    same = drafted.token_ids == plain.token_ids
    console.print(
        f"valid against its schema; {'same text' if same else 'ANOTHER TEXT'} with speculation off; acceptance length "
        f"{drafted.speculation.mean_acceptance_length:.2f}; {len(drafted.token_ids)} tokens in {1e3 * seconds:.0f} ms, "
        f"{1e3 * autoregressive_seconds:.0f} ms without",
        highlight=False,
    )
    sys.exit(not same)


def ask(llm: LLM, window: int | None) -> tuple[RequestOutput, float]:
    """Return the greedy answer and its seconds. ``window``: number of draft tokens, None for that of the bundle."""
    params = SamplingParams(
        temperature=0.0, max_tokens=256, num_draft_tokens=window, structured_outputs=StructuredOutputs(json=SCHEMA)
    )
    start = time.perf_counter()
    output = llm.generate([{"role": "user", "content": SENTENCE}], params)
    return output, time.perf_counter() - start


if __name__ == "__main__":
    typer.run(main)
