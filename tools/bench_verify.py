"""GPU time of verification and drafting by CUDA-graph replay, beside a chain of torch operations in the same process.

    python -m tools.bench_verify [--vocab 128256] [--known 32000] [--window 4] [--json FILE]

The chain is what a plain implementation launches: cast to float32, mask, scale, then Gumbel argmax and comparison, or
softmax, acceptance and residual. Logits and half of the mask bits are random. The floor is one read of the logits.
"""

import argparse
import json
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tandemrt.engines.contract import mask_words
from tandemrt.plugins.kernels.compile import compile_kernels
from tandemrt.plugins.kernels.module import KernelModule
from tandemrt.plugins.kernels.verify import ProposeLaunch, VerifyLaunch, Workspace

BYTES_PER_MICROSECOND = 4.3e6  # what one H200 reads from its memory
BATCHES = (1, 8, 16, 64)
CASES: dict[str, dict[str, float]] = {
    "no filters": {},
    "all bits set": {"bitmask": -1},
    "greedy": {"temperature": 0.0},
    "top-k 50, top-p 0.95": {"top_k": 50, "top_p": 0.95},
    "top-p 0.95": {"top_p": 0.95},
    "rejection": {"rule": 1},
}


def main() -> None:
    """Measure every case at every batch; print a table, and JSON if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab", type=int, default=128_256)
    parser.add_argument("--known", type=int, default=32_000, help="tokens of a draft that knows a part of them")
    parser.add_argument("--window", type=int, default=4)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        major, minor = torch.cuda.get_device_capability()
        compile_kernels([f"{major}.{minor}"], Path(folder), names=["verify"])
        module = KernelModule.open(Path(folder), "verify")
    rows: list[dict[str, Any]] = []
    for batch in BATCHES:
        for name, changes in CASES.items():
            tensors = inputs(batch, options.window + 1, options.vocab, **changes)
            workspace = Workspace(batch, options.window + 1, torch.device("cuda"))
            by_rejection = "rule" in changes
            stats = by_rejection or "top_p" in changes
            given = tensors if by_rejection else {n: t for n, t in tensors.items() if n != "draft_probs"}
            chain = rejection_chain if by_rejection else coupled_chain
            rows.append(
                {
                    "case": f"verify, {name}",
                    "batch": batch,
                    "kernels": microseconds(VerifyLaunch(module, given, workspace, stats=stats).run),
                    "torch": microseconds(partial(chain, tensors)),
                    "floor": 2 * tensors["logits"].numel() / BYTES_PER_MICROSECOND,
                }
            )
        for name, known, laws in (
            ("propose", options.vocab, False),
            ("propose, with laws", options.vocab, True),
            (f"propose, {options.known} known", options.known, False),
        ):
            launch = proposing(module, batch, known, options.vocab, laws=laws)
            floor = (6 if laws else 2) * batch * known / BYTES_PER_MICROSECOND
            rows.append(
                {"case": name, "batch": batch, "kernels": microseconds(launch.run), "torch": None, "floor": floor}
            )
    print(f"{torch.cuda.get_device_name()}, vocabulary {options.vocab}, window {options.window}, bf16, microseconds")
    print(f"{'':32}{'batch':>6}{'kernels':>10}{'torch':>10}{'floor':>10}")
    for row in rows:
        peer = "" if row["torch"] is None else f"{row['torch']:.1f}"
        print(f"{row['case']:32}{row['batch']:>6}{row['kernels']:>10.1f}{peer:>10}{row['floor']:>10.1f}")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


def proposing(module: KernelModule, batch: int, known: int, vocab: int, *, laws: bool) -> ProposeLaunch:
    """The draw of a token for each request by a draft that knows ``known`` of ``vocab`` tokens."""
    tensors = inputs(batch, 1, known, rule=int(laws)) | {"token": torch.zeros(batch, dtype=torch.int64, device="cuda")}
    if laws:
        tensors["draft_probs"] = torch.zeros(batch, known, device="cuda")
    else:
        del tensors["draft_probs"]
    if known < vocab:
        tensors["target_ids"] = torch.arange(known, dtype=torch.int32, device="cuda") * (vocab // known)
    return ProposeLaunch(module, tensors, Workspace(batch, 1, torch.device("cuda")), stats=False)


def inputs(batch: int, rows: int, vocab: int, **changes: float) -> dict[str, torch.Tensor]:
    """Random tensors under their contract names; ``changes`` are constants for some of them."""
    torch.manual_seed(batch)
    words = (batch, rows, mask_words(vocab))
    tensors = {
        "logits": torch.randn(batch, rows, vocab, device="cuda", dtype=torch.bfloat16) * 3,
        "bitmask": torch.randint(-(2**31), 2**31, words, device="cuda", dtype=torch.int32),
        "draft_tokens": torch.randint(0, vocab, (batch, rows - 1), device="cuda"),
        "draft_len": torch.full((batch,), rows - 1, device="cuda"),
        "draft_probs": torch.softmax(3 * torch.randn(batch, rows - 1, vocab, device="cuda"), dim=-1),
        "temperature": torch.full((batch,), 0.7, device="cuda"),
        "seed": torch.randint(0, 2**62, (batch,), device="cuda"),
        "position": torch.randint(0, 4096, (batch,), device="cuda"),
        "tokens": torch.zeros(batch, rows, dtype=torch.int64, device="cuda"),
        "count": torch.zeros(batch, dtype=torch.int64, device="cuda"),
    }
    tensors |= {name: torch.zeros(batch, device="cuda") for name in ("top_p", "min_p")}
    tensors |= {name: torch.zeros(batch, dtype=torch.int64, device="cuda") for name in ("top_k", "rule")}
    for name, value in changes.items():
        tensors[name].fill_(value)
    return tensors


def masked_scores(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """Float32 copies of the logits, masked and scaled."""
    logits, bits = tensors["logits"].float(), torch.arange(32, dtype=torch.int32, device="cuda")
    allowed = (tensors["bitmask"][..., None] >> bits & 1).bool().flatten(-2)[..., : logits.shape[-1]]
    return logits.masked_fill_(~allowed, -torch.inf).div_(tensors["temperature"].clamp(min=1e-6)[:, None, None])


def coupled_chain(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """Draw every row and count the drafts that it equals."""
    scores = masked_scores(tensors)
    drawn = (scores - torch.empty_like(scores).exponential_().log_()).argmax(dim=-1)
    return (drawn[:, :-1] == tensors["draft_tokens"]).long().cumprod(dim=-1).sum(dim=-1)


def rejection_chain(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """Toss a coin per draft and draw from the residual of every row."""
    probs, laws, draft = masked_scores(tensors).softmax(dim=-1), tensors["draft_probs"], tensors["draft_tokens"]
    p, q = (law.gather(-1, draft[..., None])[..., 0] for law in (probs[:, :-1], laws))
    accepted = (torch.rand_like(q) * q < p).long().cumprod(dim=-1).sum(dim=-1)
    residual = (probs[:, :-1] - laws).clamp_(min=0)
    (residual / torch.empty_like(residual).exponential_()).argmax(dim=-1)
    return accepted


def microseconds(run: Callable[[], object], replays: int = 200) -> float:
    """GPU time of one run: the median of five series of graph replays, each graph holding ten runs."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())  # where inputs are made
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(10):
            run()
    series: list[float] = []
    for _ in range(5):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        for _ in range(replays // 10):
            graph.replay()
        end.record()
        end.synchronize()
        series.append(1000 * start.elapsed_time(end) / replays)
    return sorted(series)[2]


if __name__ == "__main__":
    main()
