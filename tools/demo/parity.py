"""Compare the demo's tokens on another device with those on the CPU, with and without speculation.

    python -m tools.demo.parity engines/built/demo --device cuda

Devices round differently, so a difference is possible where two logits nearly tie. The first difference is printed.
"""

import time
from pathlib import Path
from typing import Annotated

import typer

from tandemrt import LLM, RequestOutput, SamplingParams, StructuredOutputs
from tools.bench.gpu.ties import first_difference
from tools.bench.report import Report, Row
from tools.demo.corpus import held_out

_COLUMNS = {
    "speculation": "",
    "overlap": "",
    "equal to the CPU": "",
    "acceptance length": ".2f",
    "rounds": "",
    "waits": "",
    "s": ".2f",
}


def main(
    bundle: Annotated[Path, typer.Argument(help="The demo's bundle.")],
    device: Annotated[str, typer.Option(help="The device to compare with the CPU.")] = "cuda",
    count: Annotated[int, typer.Option(help="How many held-out sentences.")] = 20,
    temperature: Annotated[float, typer.Option(help="0 is greedy; above it, sentence i is drawn with seed i.")] = 0.0,
) -> None:
    """Compare the tokens of ``count`` sentences; exit code 1 if any differ."""
    expected = _generate(bundle, "cpu", None, count, temperature)[0]
    rows: list[Row] = []
    different = 0
    for window in (None, 0):
        for overlap in (True, False):
            outputs, llm, seconds = _generate(bundle, device, window, count, temperature, overlap=overlap)
            pairs = list(zip(expected, outputs, strict=True))
            equal = sum(a.token_ids == b.token_ids for a, b in pairs)
            different += count - equal
            steps = sum(o.speculation.num_spec_steps for o in outputs)
            accepted = sum(o.speculation.num_accepted_draft_tokens for o in outputs)
            ways = ("on" if window is None else "off", "on" if overlap else "off", f"{equal} of {count}")
            rows.append(
                (*ways, 1 + accepted / steps if steps else None, llm.metrics.rounds, llm.metrics.waits, seconds)
            )
            for i, (a, b) in enumerate(pairs):
                if (at := first_difference(a.token_ids, b.token_ids)) is not None:
                    print(f"sentence {i}: first difference at token {at}")
    Report(None).add(device, _COLUMNS, rows)
    raise typer.Exit(1 if different else 0)


def _generate(
    bundle: Path, device: str, window: int | None, count: int, temperature: float, *, overlap: bool | None = None
) -> tuple[list[RequestOutput], LLM, float]:
    examples = held_out(count)
    params = [
        SamplingParams(temperature=temperature, seed=i, structured_outputs=StructuredOutputs(json=e.schema))
        for i, e in enumerate(examples)
    ]
    with LLM(bundle, device=device, num_draft_tokens=window, overlap=overlap) as llm:
        prompts = [e.prompt_messages() for e in examples]
        if device != "cpu":
            llm.generate(prompts, params)  # the first calls compile and allocate
        start = time.perf_counter()
        outputs = llm.generate(prompts, params)
        return outputs, llm, time.perf_counter() - start


if __name__ == "__main__":
    typer.run(main)
