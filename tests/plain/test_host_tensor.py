"""HostTensor: numpy arrays with torch's names. Operations give the same results as torch."""

import mmap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch as real
from hypothesis import given
from hypothesis import strategies as st

from tandemrt.plugins.tensors import torch as host
from tandemrt.plugins.tensors.dtypes import host_floats

DTYPES = ("bool", "uint8", "int32", "int64", "float16", "bfloat16", "float32")


def both(shape: tuple[int, ...], dtype: str = "int64") -> list[Any]:
    """Return the same values as a HostTensor and as a torch tensor."""
    tensors = []
    for library in (host, real):
        tensor = library.zeros(*shape, dtype=getattr(library, dtype), device=library.device("cpu"))
        tensor.view(tensor.numel()).copy_(library.arange(tensor.numel()))
        tensors.append(tensor)
    return tensors


def values(tensor: Any) -> Any:
    return tensor.tolist(), str(tensor.dtype), tuple(tensor.shape)


OPERATIONS = {
    "fill": lambda _, t: t.fill_(3),
    "zero": lambda _, t: t[1].zero_(),
    "one element": lambda _, t: t[1, 2].fill_(9),
    "copy": lambda _, t: t[0].copy_(t[2].clone()),
    "copy with broadcasting": lambda lib, t: t.copy_(lib.tensor([7], dtype=lib.int64)),
    "add in place": lambda lib, t: t[:2, 0].add_(lib.tensor([5, 6], dtype=lib.int64)),
    "sums and products": lambda _, t: t.copy_(2 * (t[:, :1] * True) + 1 * t.reshape(-1)[:4] + t * 3),
    "differences": lambda lib, t: t.copy_(t - lib.tensor([1, 2, 3, 4], dtype=lib.int64) - 1 + (7 - t) + -t),
    "clamp in place": lambda _, t: t.clamp_(min=4),
    "assignment": lambda lib, t: t.__setitem__((1, slice(0, 2)), lib.tensor([8, 8], dtype=lib.int64)),
    "add": lambda lib, t: lib.add(t[0], t[1], out=t[2]),
    "index_copy_": lambda lib, t: t.index_copy_(0, lib.tensor([2, 0], dtype=lib.int64), t[:2] + 5),
    "index_copy_ in columns": lambda lib, t: t.index_copy_(1, lib.tensor([3, 1], dtype=lib.int64), t[:, :2] + 5),
    "index_select": lambda lib, t: lib.index_select(t + 1, 0, lib.tensor([1, 1, 0], dtype=lib.int64), out=t),
    "zeros_like": lambda lib, t: t.copy_(lib.zeros_like(t)),
    "clamp": lambda lib, t: lib.clamp(t[:, :1], min=5, out=t[:, 1:2]),
    "sub": lambda lib, t: lib.sub(t[:, :1], t[:, 2:3], out=t[:, 1:2]),
    "mul": lambda lib, t: lib.mul(t[:, :1], t[:, 2:3], out=t[:, 1:2]),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_operations_give_the_results_of_torch(name: str) -> None:
    ours, theirs = both((3, 4))
    OPERATIONS[name](host, ours)
    OPERATIONS[name](real, theirs)
    assert values(ours) == values(theirs)


@given(rows=st.integers(1, 4), counts=st.data())
def test_gathering_the_newest_tokens_equals_torch(rows: int, counts: st.DataObject) -> None:
    index = [[counts.draw(st.integers(0, 3)) for _ in range(2)] for _ in range(rows)]
    results = []
    for library, tensor in zip((host, real), both((rows, 4)), strict=True):
        out = library.zeros(rows, 2, dtype=library.int64)
        library.gather(library.cat([tensor, tensor], 1), 1, library.tensor(index, dtype=library.int64), out=out)
        results.append(values(out))
    assert results[0] == results[1]


@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes_have_torchs_names_and_sizes(dtype: str) -> None:
    ours, theirs = both((2, 3), dtype)
    assert values(ours) == values(theirs)
    assert getattr(host, dtype).itemsize == getattr(real, dtype).itemsize
    assert ours.nbytes == theirs.nbytes
    assert ours.is_floating_point() == theirs.is_floating_point()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_host_floats_reads_any_dtype_from_either_library(dtype: str) -> None:
    for tensor in both((2, 3), dtype):
        floats = host_floats(tensor)
        assert (floats.dtype, floats.tolist()) == (np.float32, [[0, 1, 2], [3, 4, 5]])


def test_views_slices_and_dtypes_share_their_memory() -> None:
    tensor = host.zeros(2, 6, dtype=host.int32)
    tensor[1].view(2, 3)[0, 1].fill_(1)
    assert tensor.tolist() == [[0] * 6, [0, 1, 0, 0, 0, 0]]
    tensor.view(12).view(host.float32)[0:1].fill_(1.0)
    assert tensor[0, 0].item() == np.float32(1.0).view(np.int32)
    assert tensor[1].data_ptr() == tensor.data_ptr() + 24
    assert not tensor.T.is_contiguous()


def test_a_tensor_that_is_not_contiguous_has_no_view_in_another_shape() -> None:
    with pytest.raises(ValueError, match="does not lie in memory"):
        host.zeros(2, 3).T.view(6)


@pytest.mark.parametrize("library", [host, real])
def test_clamp_changes_no_dtype(library):
    counts, out = (library.zeros(3, dtype=getattr(library, dtype)) for dtype in ("int64", "float32"))
    with pytest.raises((RuntimeError, TypeError)):
        library.clamp(counts, max=1, out=out)


@pytest.mark.skipif(not hasattr(mmap, "MADV_NOHUGEPAGE"), reason="huge pages and /proc are Linux's")
def test_a_large_tensor_takes_memory_only_where_it_was_written() -> None:
    tensor, before = host.zeros(64, 1 << 20, dtype=host.uint8), resident_bytes()
    tensor[:, 0].fill_(1)  # one page in each megabyte
    assert resident_bytes() - before < 16 << 20


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * mmap.PAGESIZE


def test_an_entry_that_is_raised_several_times_has_the_largest_value() -> None:
    for tensor, library in zip(both((5,)), (host, real), strict=True):
        index, raised = (library.zeros(4, dtype=library.int64, device=library.device("cpu")) for _ in range(2))
        for at, (entry, value) in enumerate(((1, 7), (1, 3), (4, 2), (0, 1))):
            index[at], raised[at] = entry, value
        host.raise_entries(tensor, index, raised)
        assert tensor.tolist() == [1, 7, 2, 3, 4]
