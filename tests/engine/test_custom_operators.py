"""Operators with a C kernel: compiled once, equal on every path, and replaced by their function without a compiler."""

import ctypes
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
import torch
from onnx_ir.traversal import RecursiveGraphIterator

from tandemrt.engines.recipe.recipe import Recipe
from tandemrt.export.bundle import models
from tandemrt.export.bundle.build import build
from tandemrt.export.model import activation, grouped_attention
from tandemrt.export.passes import residual_norms
from tandemrt.plugins.implementations import launcher
from tandemrt.plugins.onnxruntime import custom_operators
from tandemrt.plugins.onnxruntime.compiler import compile_library
from tandemrt.plugins.operators.launch import Context
from tests.engine.implementation_cases import KINDS, Case, allocated, cases, hold
from tests.engine.quantized import texts_with_and_without_speculation
from tests.engine.test_row_bits import BY_ROW
from tests.engine.test_row_bits import test_an_operator_gives_a_row_the_same_bits_in_any_number_of_rows as hold_row_bits
from tests.makers import tiny_checkpoint, write_recipe

OPERATORS = custom_operators.OPERATORS
BUILT = [  # dtype, operators
    *((dtype, "low_bit_int8_matmul", "MatMulNBits") for dtype in ("int4", "int8")),
    ("float32", "tiled_matmul", "FusedMatMul"),
]
NGRAM = 'kind = "ngram"\nnum_draft_tokens = 4\nngram_min = 1\nngram_max = 3'


@pytest.fixture
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache, in which nothing was compiled yet."""
    monkeypatch.setenv("TANDEMRT_CACHE", str(tmp_path / "cache"))
    custom_operators._library.cache_clear()
    yield tmp_path / "cache" / "custom_operators"
    custom_operators._library.cache_clear()


@pytest.fixture
def no_compiler(cache_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(cache_folder))
    monkeypatch.delenv("CC", raising=False)


def hold_all() -> None:
    for operator in OPERATORS:
        for dtype in KINDS if operator == "tiled_matmul" else ["float32"]:
            for case in cases(operator, dtype):
                hold(operator, case, Context(torch.device("cpu"), threads=1))
        if operator in BY_ROW:
            hold_row_bits(operator, 2)


@pytest.mark.parametrize("width", range(1, 18))
def test_a_gated_activation_of_any_width_equals_the_reference(width: int) -> None:
    values = np.random.default_rng(width).normal(size=(3, 1, 2 * width)).astype(np.float32)
    hold("swiglu", Case({"gate_up": values}), Context(torch.device("cpu"), threads=1))


class Mallinfo2(ctypes.Structure):
    """What mallinfo2 of glibc returns: ten sizes, the eighth of which is the bytes in use."""

    _fields_ = [(f"size_{number}", ctypes.c_size_t) for number in range(10)]


def memory_in_use() -> int:
    mallinfo = ctypes.CDLL(None).mallinfo2
    mallinfo.restype = Mallinfo2
    return int(mallinfo().size_7)


@pytest.mark.parametrize("operator", OPERATORS)
def test_calls_of_a_kernel_leak_no_memory(operator: str) -> None:
    context = Context(torch.device("cpu"), threads=1)
    case = next(cases(operator, "float32"))
    tensors, _ = allocated(operator, case, context.device)
    call = launcher(operator, context)(tensors, case.attributes, context)
    call.run()
    before, count = memory_in_use(), 200
    for _ in range(count):
        call.run()
    assert memory_in_use() - before < 16 * count


def test_a_library_is_compiled_once_for_all_processes_of_its_user(
    cache_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(custom_operators, "_OPTIONS", ("-fPIC", "-DPORTABLE"))  # in a second instead of 18
    path = custom_operators.library()
    assert path is not None
    assert [*cache_folder.iterdir()] == [path]
    custom_operators._library.cache_clear()
    monkeypatch.setenv("PATH", "")  # as in another process, on a machine without a compiler
    assert custom_operators.library() == path
    path.chmod(0o777)  # code that other users may have written
    custom_operators._library.cache_clear()
    assert custom_operators.library() is None


def test_kernels_of_another_processor_are_used_without_a_compiler_alone(
    cache_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(custom_operators, "_OPTIONS", ("-fPIC", "-DPORTABLE"))  # in a second instead of 18
    own, other, *_ = custom_operators._paths()
    cache_folder.mkdir(parents=True)
    other.touch(mode=0o700)
    assert custom_operators._begun().result() == own
    custom_operators._library.cache_clear()
    own.unlink()
    monkeypatch.setenv("PATH", "")
    assert custom_operators._begun().result() == other


@pytest.mark.parametrize(
    ("flags", "options", "avx2"),
    [
        ("avx2 fma avx512f avx512bw avx512_vnni", ("-DHAS_AVX2",), False),
        ("avx2 fma avx512f avx512bw", ("-DHAS_AVX2",), True),
        ("avx2 fma", ("-DHAS_AVX2", "-DNO_AVX512"), True),
        ("avx sse4_2", (), False),
        ("asimd", (), False),
    ],
)
def test_kernels_are_compiled_for_the_vectors_of_this_processor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: str, options: tuple[str, ...], avx2: bool
) -> None:
    """Integer matmuls use it only with VNNI."""
    (tmp_path / "cpuinfo").write_text(f"processor: 0\nflags: {flags}\n\nprocessor: 1\n")
    monkeypatch.setattr(custom_operators, "_CPU_INFO", tmp_path / "cpuinfo")
    assert custom_operators._processor_options() == options
    assert custom_operators.multiplies_with_avx2() == avx2


def test_a_build_goes_on_while_the_kernels_are_compiled(
    cache_folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    begin, compiler = tmp_path / "begin", tmp_path / "cc"
    checks = 'case "$*" in *-fsyntax-only*) exit 0; esac'
    compiler.write_text(f"#!/bin/sh\n{checks}\nwhile [ ! -e {begin} ]; do sleep 0.1; done\nexit 1\n")
    compiler.chmod(0o700)
    monkeypatch.setenv("CC", str(compiler))
    assert custom_operators.has_kernels()
    begin.touch()
    assert custom_operators.library() is None
    assert not custom_operators.has_kernels()
    assert not [*cache_folder.iterdir()]


@pytest.mark.parametrize("option", ["-DPORTABLE", "-DNO_AVX512"])
@pytest.mark.usefixtures("cache_folder")
def test_kernels_of_other_processors_equal_the_reference(option: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processors without AVX2 run the first ones, processors without AVX-512 the second ones."""
    monkeypatch.setattr(custom_operators, "_OPTIONS", (*custom_operators._OPTIONS, option, "-O1"))  # compiles faster
    hold_all()


@pytest.mark.usefixtures("no_compiler")
def test_without_a_compiler_the_function_equals_the_reference(caplog: pytest.LogCaptureFixture) -> None:
    hold_all()
    assert "no C compiler was found" in caplog.text


def test_a_compiler_that_fails_is_reported(
    cache_folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(custom_operators, "_OPTIONS", (*custom_operators._OPTIONS, "-no-such-option"))
    assert custom_operators.library() is None
    assert "cannot be compiled by" in caplog.text
    assert not [*cache_folder.iterdir()]


def test_the_end_of_a_compilers_message_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    program = tmp_path / "cc"
    program.write_text(f"#!/bin/sh\necho {'warning ' * 99} the reason >&2\nexit 1\n")
    program.chmod(0o755)
    assert compile_library(str(program), [program], tmp_path / "library.so", []) is None
    assert caplog.text.rstrip().endswith("the reason")
    assert len(caplog.messages[0]) < 400 + len(str(program))


@pytest.mark.parametrize(("dtype", "operator", "otherwise"), BUILT)
@pytest.mark.parametrize("compiler", [True, False])
def test_a_build_uses_an_operator_only_with_a_compiler(
    tmp_path: Path, compiler: bool, dtype: str, operator: str, otherwise: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not compiler:
        for module in (models, grouped_attention, activation, residual_norms):
            monkeypatch.setattr(module, "has_kernels", lambda: False)
    target = tiny_checkpoint(tmp_path / "t", layers=1, head_dim=32)
    recipe = write_recipe(tmp_path / "r.toml", target=target, dtype=dtype, drafting=NGRAM)
    report = build(Recipe.load(recipe), tmp_path / "bundle")
    graph = ir.load(report.folder / report.manifest.engines["target"].files[0]).graph
    kinds = {node.op_type for node in RecursiveGraphIterator(graph)}
    assert (operator in kinds, otherwise in kinds) == (compiler, not compiler)
    assert ("decode_attention" in kinds, "Loop" in kinds) == (compiler, not compiler)
    assert ("swiglu" in kinds, "QuickGelu" in kinds) == (compiler, not compiler)
    assert ("residual_norm" in kinds, "SkipSimplifiedLayerNormalization" in kinds) == (compiler, not compiler)
    assert any("no C compiler works here" in note for note in report.notes) != compiler
    texts, _ = texts_with_and_without_speculation(tmp_path / "bundle")
    assert texts[0] == texts[1]
