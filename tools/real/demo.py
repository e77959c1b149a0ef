"""Answer with a JSON schema, with speculation and without, by a trained model.

make real
"""

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from tandemrt import LLM, SamplingParams, StructuredOutputs
from tools.demo.shown import answer

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


def main(bundle: Annotated[Path, typer.Argument(help="The bundle of tools/real/recipe.toml.")]) -> None:
    """Answer twice; the exit code is 1 if the answer is invalid or if speculation changed it."""
    params = SamplingParams(temperature=0.0, max_tokens=256)
    with LLM(bundle) as llm:
        for window in (None, 0):  # the first run of each kind allocates and compiles
            first = {"num_draft_tokens": window, "structured_outputs": StructuredOutputs(json=SCHEMA)}
            llm.generate([{"role": "user", "content": SENTENCE}], params.model_copy(update=first))
        good = answer(llm, SENTENCE, SCHEMA, title="SmolLM2-135M-Instruct", params=params)
    sys.exit(not good)


if __name__ == "__main__":
    typer.run(main)
