"""Time single kernels on a CUDA GPU by replay of CUDA graphs, next to other implementations of the same operation.

    python -m tools.bench.kernels attention         # attention over a paged KV cache
    python -m tools.bench.kernels layer             # the kernels of a layer in their order, and what each costs
    python -m tools.bench.kernels latent            # latent attention over a paged cache
    python -m tools.bench.kernels recurrence        # recurrent layers of hybrid models
    python -m tools.bench.kernels verify            # verification and sampling of drafts
    python -m tools.bench.kernels experts           # a mixture of experts
    python -m tools.bench.kernels float8            # FP8 matmuls, and the operators between them
    python -m tools.bench.kernels int4              # matmuls with weights of 4 and 8 bits
    python -m tools.bench.kernels collectives       # all_reduce of several GPUs

``python -m tools.bench.kernels CASE --help`` lists a case's options. Every case prints tables and writes them to
``--json FILE``. Weights and caches exceed the second-level cache of the GPU, so every run reads them from memory.
"""

from collections.abc import Callable

from tools.bench.cases import run_cases
from tools.bench.kernels import attention, collectives, experts, float8, int4, latent, layer, recurrence, verify

CASES: dict[str, Callable[..., None]] = {
    "attention": attention.main,
    "layer": layer.main,
    "latent": latent.main,
    "recurrence": recurrence.main,
    "verify": verify.main,
    "experts": experts.main,
    "float8": float8.main,
    "int4": int4.main,
    "collectives": collectives.main,
}

if __name__ == "__main__":
    run_cases(CASES)
