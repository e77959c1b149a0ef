"""What each plugin is: its tensors, the shapes of its outputs, and the one kernel launch that computes them.

Nothing here needs TensorRT. A dimension is an int, or whatever adds, multiplies and divides like one: TensorRT's
symbolic expressions at build time. So the launch that an engine carries and the launch that a test makes on a GPU
come from the same function.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from tandemrt.engines import contract
from tandemrt.engines.binding import Binding
from tandemrt.plugins.kernels.compile import compile_ptx

Dim = Any  # int, or a symbolic expression
Shapes = Mapping[str, Sequence[Dim]]

LOGITS = "logits"  # stands for the dtype of the logits: one of SUFFIXES, the same throughout a node
SUFFIXES = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
_TYPES = {"fp32": "float", "fp16": "fp16", "bf16": "bf16"}  # in CUDA C++
_ANY = 32  # width of the vocabulary, where only the rank of a shape counts
_ARCHITECTURE = "8.0"  # the oldest that has bfloat16: a driver translates its PTX for every later GPU


@dataclass(frozen=True)
class Launch:
    """Grid and threads of a block; ``scalars`` are the int32 arguments between input and output addresses."""

    grid: tuple[Dim, Dim, Dim]
    threads: int
    scalars: tuple[Dim, ...]


@dataclass(frozen=True)
class Operator:
    """One plugin. The kernel ``NAME_SUFFIX`` of ``header`` takes inputs, scalars and outputs, in this order."""

    name: str
    inputs: tuple[Binding, ...]
    outputs: tuple[Binding, ...]
    header: str
    output_shapes: Callable[[Shapes], tuple[tuple[Dim, ...], ...]]
    launch: Callable[[Shapes], Launch]

    def kernel(self, dtype: str) -> str:
        """Return the name of the kernel for logits of ``dtype``, one of :data:`SUFFIXES`."""
        return f"{self.name}_{SUFFIXES[dtype]}"

    def ptx(self, dtype: str) -> str:
        """Compile that kernel and nothing else. Raises BackendUnavailable without NVRTC."""
        suffix = SUFFIXES[dtype]
        return _ptx(f'#include "{self.header}"\n{self.name.upper()}({suffix}, {_TYPES[suffix]})\n')


@cache
def _ptx(source: str) -> str:
    return compile_ptx(source, _ARCHITECTURE)


def _verify(*, draft_probs: bool) -> Operator:
    bindings = contract.verify(vocab=_ANY, dtype=LOGITS, draft_probs=draft_probs)
    return Operator(
        name="verify_draft_probs" if draft_probs else "verify_draft",
        inputs=tuple(binding for binding in bindings.inputs if binding.name != "bitmask"),
        outputs=bindings.outputs,
        header="verify_one.cuh",
        output_shapes=_verified,
        launch=_verify_launch,
    )


def _bitmask() -> Operator:
    logits = contract.verify(vocab=_ANY, dtype=LOGITS, draft_probs=False)["logits"]
    return Operator(
        name="token_bitmask",
        inputs=(logits, contract.verify(vocab=_ANY, dtype=LOGITS, draft_probs=False)["bitmask"]),
        outputs=(Binding("masked", LOGITS, logits.shape),),
        header="bitmask.cuh",
        output_shapes=lambda shapes: (tuple(shapes["logits"]),),
        launch=_bitmask_launch,
    )


def _verified(shapes: Shapes) -> tuple[tuple[Dim, ...], ...]:
    batch, rows, _ = shapes["logits"]
    return (batch, rows), (batch,)


def _verify_launch(shapes: Shapes) -> Launch:
    batch, rows, vocab = shapes["logits"]
    return Launch(grid=(batch, 1, 1), threads=1024, scalars=(rows, vocab))


def _bitmask_launch(shapes: Shapes) -> Launch:
    batch, rows, vocab = shapes["logits"]
    return Launch(grid=((vocab + 2047) // 2048, batch * rows, 1), threads=256, scalars=(vocab,))


OPERATORS = (_bitmask(), _verify(draft_probs=False), _verify(draft_probs=True))
