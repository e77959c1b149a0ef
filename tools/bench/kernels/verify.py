"""Case ``verify``: the kernels that verify drafts and sample draft tokens.

python -m tools.bench.kernels verify [--vocab 128256] [--draft-vocab 32000] [--num-draft-tokens 4] [--json FILE]

The logits and half of the mask bits are random. The floor is one read of the logits.
"""

from typing import Annotated

import torch
import typer

from tandemrt.engines.contract.masks import mask_words
from tandemrt.engines.contract.sampling_parameters import FILTERS, SAMPLING_PARAMETERS
from tandemrt.plugins.kernels.module import KernelModule
from tandemrt.plugins.kernels.verify import ProposeLaunch, VerifyLaunch, VerifyWorkspace
from tools.bench.kernels.compiled import compiled_kernels
from tools.bench.kernels.replay import bandwidth, median_us
from tools.bench.report import Json, Report, Row

BATCHES = (1, 8, 16, 64)
CASES: dict[str, dict[str, float]] = {
    "no filters": {},
    "all bits set": {"bitmask": -1},
    "greedy": {"temperature": 0.0},
    "top-k 50, top-p 0.95": {"top_k": 50, "top_p": 0.95},
    "top-p 0.95": {"top_p": 0.95},
    "top-n-sigma 1": {"top_n_sigma": 1},
    "rejection": {"rule": 1},
}
COLUMNS = {"case": "", "batch": ""} | dict.fromkeys(("kernels", "floor"), ".1f")


def main(
    vocab: Annotated[int, typer.Option(help="Tokens of the target's vocabulary.")] = 128_256,
    draft_vocab: Annotated[int, typer.Option(help="Tokens of a draft with a reduced vocabulary.")] = 32_000,
    num_draft_tokens: Annotated[int, typer.Option(help="Drafted tokens per row.")] = 4,
    out: Json = None,
) -> None:
    """Time verification and sampling of drafts."""
    lines: list[Row] = []
    with compiled_kernels("verify") as context:
        assert context.kernels is not None
        module = KernelModule.open(context.kernels, "verify")
    for batch in BATCHES:
        for name, changes in CASES.items():
            tensors = inputs(batch, num_draft_tokens + 1, vocab, **changes)
            workspace = VerifyWorkspace(batch, num_draft_tokens + 1, torch.device("cuda"))
            by_rejection = "rule" in changes
            stats = by_rejection or not FILTERS.keys().isdisjoint(changes)
            read = tensors if by_rejection else {n: t for n, t in tensors.items() if n != "draft_probs"}
            ours = median_us(VerifyLaunch(module, read, workspace, stats=stats).run)
            floor = 2 * tensors["logits"].numel() / (bandwidth() / 1e6)
            lines.append((f"verify, {name}", batch, ours, floor))
        for name, size, probs in (
            ("propose", vocab, False),
            ("propose, with probabilities", vocab, True),
            (f"propose, {draft_vocab} tokens", draft_vocab, False),
        ):
            launch = proposal(module, batch, size, vocab, probs=probs)
            floor = (6 if probs else 2) * batch * size / (bandwidth() / 1e6)
            lines.append((name, batch, median_us(launch.run), floor))
    title = f"{torch.cuda.get_device_name()}, vocabulary {vocab}, {num_draft_tokens} draft tokens, bf16, microseconds"
    Report(out).add(title, COLUMNS, lines)


def proposal(module: KernelModule, batch: int, size: int, vocab: int, *, probs: bool) -> ProposeLaunch:
    """Bind the kernel that samples a draft token per row, for a draft with ``size`` of the ``vocab`` tokens.

    ``probs``: it writes the draft's probabilities, too.
    """
    tensors = inputs(batch, 1, size, rule=int(probs)) | {"token": torch.zeros(batch, dtype=torch.int64, device="cuda")}
    if probs:
        tensors["draft_probs"] = torch.zeros(batch, size, device="cuda")
    else:
        del tensors["draft_probs"]
    if size < vocab:
        tensors["target_ids"] = torch.arange(size, dtype=torch.int32, device="cuda") * (vocab // size)
    return ProposeLaunch(module, tensors, VerifyWorkspace(batch, 1, torch.device("cuda")), stats=False)


def inputs(batch: int, rows: int, vocab: int, **changes: float) -> dict[str, torch.Tensor]:
    """Return random tensors by their contract names; ``changes`` fills some of them with a constant."""
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
    tensors |= {
        name: torch.zeros(batch, dtype=getattr(torch, parameter.dtype), device="cuda")
        for name, parameter in SAMPLING_PARAMETERS.items()
        if name not in tensors
    }
    for name, value in changes.items():
        tensors[name].fill_(value)
    return tensors
