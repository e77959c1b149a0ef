"""Print held-out sentences with their schemas as JSON lines, the form ``tandemrt bench --prompts`` reads."""

import json
from typing import Annotated

import typer

from tools.demo.corpus import held_out


def main(count: Annotated[int, typer.Argument(help="How many sentences.")] = 32) -> None:
    """Print ``count`` held-out sentences."""
    for example in held_out(count):
        print(json.dumps({"messages": example.prompt_messages(), "schema": example.schema}, ensure_ascii=False))


if __name__ == "__main__":
    typer.run(main)
