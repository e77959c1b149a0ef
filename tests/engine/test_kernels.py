"""The CUDA kernels compile for every architecture without a GPU, and say what they need."""

import re

import pytest

from tandemrt.engines.errors import BackendUnavailable
from tandemrt.plugins.kernels import compile as compiler

DTYPES = ("bf16", "fp16", "fp32")
# Kernel: inputs, int32 scalars, outputs.
PARAMETERS = {
    "row_stats": (12, 3, 1),
    "choose": (13, 3, 7),
    "draft_law": (10, 1, 1),
}


@pytest.fixture(scope="module")
def compiled():
    return {c.file: c for c in compiler.compile_kernel("verify", compiler.ARCHITECTURES)}


def test_the_entry_points_have_the_parameters_that_launchers_pass(compiled):
    """Pointers to inputs, then 32-bit scalars, then pointers to outputs: the order of ahead-of-time plugins."""
    text = compiled["verify.ptx"].code.decode()
    entries = re.findall(r"\.visible \.entry (\w+)\((.*?)\)", text, re.DOTALL)
    found = {name: re.findall(r"\.param \.([us]\d+)", parameters) for name, parameters in entries}
    expected = {
        f"{name}_{dtype}": ["u64"] * inputs + ["u32"] * scalars + ["u64"] * outputs
        for name, (inputs, scalars, outputs) in PARAMETERS.items()
        for dtype in DTYPES
    }
    assert found == expected


def test_kernels_keep_what_they_work_on_in_registers(compiled):
    """A few bytes around a rare call are no matter; arrays in local memory would be."""
    log = compiled["verify.sm_90.cubin"].log
    spills = re.findall(r"entry function '(\w+)'.*?(\d+) bytes spill stores", log, re.DOTALL)
    assert len(spills) == len(PARAMETERS) * len(DTYPES)
    assert {name: size for name, size in spills if int(size) > 32} == {}


def test_verification_compiles_for_every_architecture(compiled):
    digits = [architecture.replace(".", "") for architecture in compiler.ARCHITECTURES]
    assert set(compiled) == {*(f"verify.sm_{a}.cubin" for a in digits), "verify.ptx"}
    assert all(c.code.startswith(b"\x7fELF") for file, c in compiled.items() if file.endswith(".cubin"))


def test_headers_are_found_by_name(tmp_path, monkeypatch):
    (tmp_path / "included.cu").write_text('#include "one.cuh"\nextern "C" __global__ void store(int* x) { *x = ONE; }')
    (tmp_path / "one.cuh").write_text("#define ONE 1\n")
    monkeypatch.setattr(compiler, "SOURCES", tmp_path)
    written = compiler.compile_kernels(["9.0"], tmp_path / "kernels")
    assert [path.name for path in written] == ["included.sm_90.cubin", "included.ptx"]


def test_the_lowest_architecture_gives_the_ptx(tmp_path, monkeypatch):
    (tmp_path / "copy.cu").write_text('extern "C" __global__ void copy(int* x) { *x = 1; }')
    monkeypatch.setattr(compiler, "SOURCES", tmp_path)
    files = [c.file for c in compiler.compile_kernel("copy", ["12.0", "8.9", "12.0"])]
    assert files == ["copy.sm_89.cubin", "copy.sm_120.cubin", "copy.ptx"]
    assert b".target sm_89" in compiler.compile_kernel("copy", ["12.0", "8.9"])[-1].code


def test_a_source_that_does_not_compile_is_refused_with_the_compilers_words(tmp_path, monkeypatch):
    (tmp_path / "wrong.cu").write_text('extern "C" __global__ void wrong(int* x) { *x = missing; }')
    monkeypatch.setattr(compiler, "SOURCES", tmp_path)
    with pytest.raises(BackendUnavailable, match=r'wrong\.cu: .* sm_90 .*\n.*identifier "missing" is undefined'):
        compiler.compile_kernel("wrong", ["9.0"])


@pytest.mark.parametrize("architectures", [[], ["7.5"], ["sm_90"]])
def test_architectures_that_are_not_supported_are_refused(architectures):
    with pytest.raises(ValueError, match=r"architectures: one or more of 8\.0, .* are needed, got"):
        compiler.compile_kernel("verify", architectures)
