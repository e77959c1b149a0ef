"""The CUDA kernels compile for every compute capability without a GPU, and say what they need."""

import re
from itertools import groupby

import pytest

from tandemrt.engines.contract.gpus import COMPUTE_CAPABILITIES
from tandemrt.engines.contract.sampling_parameters import SAMPLING_PARAMETERS
from tandemrt.engines.validation.errors import BackendUnavailable
from tandemrt.plugins.kernels import compile as compiler
from tandemrt.plugins.kernels import nvrtc
from tandemrt.plugins.operators.constants import KEY_DIMS, WIDE_HEAD_DIM
from tandemrt.plugins.operators.float4 import GROUP_SIZES
from tandemrt.plugins.operators.k_quants_layout import K_QUANTS

SUFFIXES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
LAST = COMPUTE_CAPABILITIES[-1]
HOPPER = "9.0"  # with instructions that no other GPU has
LOW_BIT = {
    **{f"matmul_{rows}": "4 u64, 4 u32, 1 u64" for rows in (8, 16, 32, 64)},
    "weights": "3 u64, 3 u32, 1 u64",
}
ACTIVATION = "1 u64, 1 u32, 4 f32"
LOW_BIT_EXPERTS = {
    "gate_up": f"4 u64, 1 u32, 3 u64, 3 u32, {ACTIVATION}, 1 u64",
    "down": "4 u64, 1 u32, 4 u64, 2 u32, 2 u64",
    "weights": "3 u64, 3 u32, 1 u64",
}
KEPT = {f"{name}_kept": f"{LOW_BIT_EXPERTS[name]}, 2 u32" for name in ("gate_up", "down")}


def by_group(entries: dict[str, str]) -> dict[str, str]:
    """Return the ``entries`` of kernels for each size of groups of 4-bit floats."""
    return {f"{name}_by{group}": parameters for name, parameters in entries.items() for group in GROUP_SIZES}


# The parameters that launchers pass: pointers to inputs, 32-bit scalars, pointers to outputs.
ENTRIES = {
    "adjust": {"adjust": "9 u64, 3 u32, 1 u64"},
    "experts": {
        "route_few": "1 u64, 5 u32, 1 u64, 1 u32, 6 u64",
        "choose": "1 u64, 5 u32, 3 u64",
        "place": "1 u64, 3 u32, 5 u64",
        "gate_up": f"5 u64, 3 u32, {ACTIVATION}, 1 u64",
        "down": "6 u64, 2 u32, 2 u64",
        "sum": "1 u64, 2 u32, 1 u64",
        "gather": "2 u64, 2 u32, 1 u64",
        "activate": f"2 u64, 2 u32, {ACTIVATION}, 1 u64",
        "sum_places": "4 u64, 1 u32, 1 u64, 2 u32, 1 u64",
    },
    "float8": {
        "quantize_tokens": "2 u64, 1 u32, 2 u64",
        "quantized_swiglu_1": "4 u64, 1 u32, 2 u64",
        "quantized_swiglu_2": "4 u64, 1 u32, 2 u64",
        "quantized_swiglu_4": "4 u64, 1 u32, 2 u64",
        "few_rows_8": "4 u64, 3 u32, 1 u64",
        "few_rows_16": "4 u64, 3 u32, 1 u64",
        "quantized_norm": "6 u64, 1 u32, 1 f32, 3 u64",
        "scale_matmul": "2 u64, 1 u32, 1 u64",
    },
    "int4": LOW_BIT | {f"{name}_zeros": parameters for name, parameters in LOW_BIT.items()},
    "int8": LOW_BIT,
    "float4": by_group(LOW_BIT),
    "k_quants": {f"{name}_{kind}": parameters for name, parameters in LOW_BIT.items() for kind in K_QUANTS},
    "experts_int4": LOW_BIT_EXPERTS | {f"{name}_zeros": parameters for name, parameters in LOW_BIT_EXPERTS.items()},
    "experts_int8": LOW_BIT_EXPERTS,
    "experts_float4": by_group(LOW_BIT_EXPERTS | KEPT),
    "experts_float8": LOW_BIT_EXPERTS | KEPT,
    "collectives": {"all_reduce_early": "1 u64, 2 u32, 5 u64, 1 u32, 1 u64"},
    "latent_attention": {},  # not the same for all dtypes: see expected
    "linear_attention": {},  # with sizes: see expected
    "residual_norm": {"residual_norm": "3 u64, 1 u32, 1 f32, 2 u64"},
    "short_convolution": {"short_convolution": "7 u64, 5 u32, 2 u64", "keep_recent": "4 u64, 3 u32, 1 u64"},
    "linear": dict.fromkeys(
        ("narrow_rows", *(f"few_rows_{rows}_{stages}" for rows in (8, 16) for stages in (6, 16))), "2 u64, 4 u32, 1 u64"
    ),
    "gated_linear": {"gated_linear": "3 u64, 3 u32"},
    "swiglu": {"swiglu": "1 u64, 1 u32, 1 u64"},
    "verify": {
        "row_stats": f"{5 + len(SAMPLING_PARAMETERS)} u64, 3 u32, 3 u64",
        "choose": f"{7 + len(SAMPLING_PARAMETERS)} u64, 3 u32, 7 u64",
        "draft_probs": f"{4 + len(SAMPLING_PARAMETERS)} u64, 1 u32, 1 u64",
    },
}
COLLECTIVES = {  # of bytes, whatever the dtype
    **{f"all_gather_{bits}": "1 u64, 2 u32, 4 u64, 3 u32, 1 u64" for bits in (16, 32, 128)},
    "publish": "1 u64, 2 u32, 4 u64, 1 u32",
    "receive": "1 u64, 2 u32, 5 u64, 1 u32",
}
LOW_BIT_FILES = ("int4", "int8", "float4", "k_quants")
LOW_BIT_FILES += ("experts_int4", "experts_int8", "experts_float4", "experts_float8")
ORDERED_EXPERTS = {
    "gate_up_ordered": f"4 u64, 4 u32, 1 u64, 1 u32, {ACTIVATION}, 1 u64",
    "down_ordered": "4 u64, 4 u32, 1 u64",
}
ORDERED = ("8_6", "8_8", "16_6")  # rows and stages, on Hopper
ATTENTION = ("attention", "attention_float8")
APPEND, ATTEND, PLAIN = "10 u64, 8 u32, 4 f32, 2 u64", "10 u64, 10 u32, 4 f32, 6 u64", "10 u64, 8 u32, 4 f32, 3 u64"
PREPARE, PLAIN_RUNS = "12 u64, 9 u32, 4 f32, 4 u64", "12 u64, 8 u32, 4 f32, 3 u64"
WIDE_RUNS = "12 u64, 10 u32, 4 f32, 3 u64"
IMAGES, PLAIN_IMAGES = "13 u64, 10 u32, 4 f32, 6 u64", "13 u64, 8 u32, 4 f32, 3 u64"
ATTEND_RUNS, WIDEN = "12 u64, 10 u32, 4 f32, 6 u64", "12 u64, 8 u32, 4 f32, 4 u64"
CONVOLVE, SCAN = "7 u64, 1 u32, 1 f32, 5 u64, 20 u32, 1 u64", "7 u64, 20 u32, 2 u64"
FINISH = "9 u64, 23 u32, 1 f32, 2 u64"
CHUNKS = {
    "convolve_chunks": "7 u64, 1 u32, 1 f32, 5 u64, 21 u32, 1 u64",
    "prepare_chunks": "6 u64, 20 u32, 1 u64",
    "scan_chunks": "7 u64, 20 u32, 3 u64",
    "finish_heads": "9 u64, 21 u32, 1 f32, 2 u64",
}
# Bytes: some between phases are no matter; in a loop over the logits they would be. Of int4 for one GPU alone, 12.0. Of
# attention in attend_fixed alone, of linear_attention in scan_windows; most of them for GPUs from 10.0 on, where they
# were not run.
SPILLED_256 = 1150
LATENT = "9 u64, 5 u32, 1 f32"
SPILLED = {
    "verify": 250,
    "int4": 16,
    "experts_float4": 72,
    "experts_float8": 52,
    "k_quants": 104,
    "attention": 180,
    "attention_float8": 132,
    "linear_attention": 92,
    "collectives": 8,
}


def expected(kernel: str, dtype: str, head_dims: tuple[int, ...] | None) -> dict[str, str]:
    suffix = SUFFIXES[dtype]
    if kernel in (*LOW_BIT_FILES, "linear", "gated_linear") and dtype == "float32":
        return {}
    if kernel == "attention_images":
        return {f"attend_images_{suffix}_{size}": PLAIN_IMAGES if dtype == "float32" else IMAGES for size in head_dims}
    if kernel == "latent_attention":
        if dtype == "float32":
            return {f"append_latent_{suffix}": LATENT, f"attend_latent_{suffix}": f"{LATENT}, 1 u64"}
        attend = {f"attend_latent_{suffix}_{rows}": f"{LATENT}, 3 u32, 3 u64" for rows in (16, 32, 64)}
        return {f"append_latent_{suffix}": LATENT, f"merge_latent_{suffix}": f"{LATENT}, 1 u32, 3 u64"} | attend
    if kernel == "linear_attention":
        rules = ("delta", "channels", "gated")
        kinds = [f"{suffix}_{rule}_{size}" for size in head_dims for rule in rules if size <= 128 or rule == "gated"]
        steps = (("convolve", CONVOLVE), ("scan", SCAN), ("scan_windows", SCAN), ("finish", FINISH))
        entries = {f"{name}_{kind}": entry for kind in kinds for name, entry in steps}
        if dtype == "float32" or 128 not in head_dims:
            return entries
        return entries | {f"{name}_{suffix}_delta_128": entry for name, entry in CHUNKS.items()}
    if kernel not in ATTENTION:
        entries = {f"{name}_{suffix}": parameters for name, parameters in ENTRIES[kernel].items()}
        if kernel == "experts" and dtype != "float32":
            entries |= {f"{name}_{suffix}": parameters for name, parameters in ORDERED_EXPERTS.items()}
        if kernel == "collectives":
            return entries | COLLECTIVES
        ordered = ORDERED if kernel == "float8" and dtype != "float16" else ()
        return entries | {f"few_ordered_{name}_{suffix}": "4 u64, 4 u32, 1 u64" for name in ordered}
    entries = {f"append_{suffix}_{size}": APPEND for size in head_dims}
    entries |= {f"prepare_{suffix}_{size}": PREPARE for size in head_dims}
    if dtype == "float32":
        entries |= {f"attend_runs_{suffix}_{size}": PLAIN_RUNS for size in head_dims}
        return entries | {f"attend_{suffix}_{size}": PLAIN for size in head_dims}
    if WIDE_HEAD_DIM in head_dims:
        entries |= {f"attend_{suffix}_{WIDE_HEAD_DIM}_{rows}": ATTEND for rows in (16, 32)}
        entries |= {f"attend_runs_{suffix}_{WIDE_HEAD_DIM}_{rows}": WIDE_RUNS for rows in (16, 64)}
    by_tensor_cores = [size for size in head_dims if size != WIDE_HEAD_DIM]
    entries |= {f"attend_runs_{suffix}_{size}": ATTEND_RUNS for size in by_tensor_cores}
    if kernel == "attention_float8":
        entries |= {f"widen_{suffix}_{size}": WIDEN for size in by_tensor_cores}
    names = [f"{suffix}_{size}_{rows}" for size in by_tensor_cores for rows in (16, 32, 64)]
    entries |= {f"{attend}_{name}": ATTEND for attend in ("attend", "attend_fixed") for name in names}
    if 128 in by_tensor_cores:  # all windows of up to 16 rows are few
        del entries[f"attend_fixed_{suffix}_128_16"]
        entries |= {f"attend_few_{suffix}_128_{rows}": ATTEND for rows in (16, 32, 64)}
    return entries


def entries_of(ptx: compiler.CompiledKernels) -> dict[str, str]:
    """The entry points of PTX and their parameters: "12 u64, 3 u32, 1 u64"."""
    entries = re.findall(r"\.visible \.entry (\w+)\((.*?)\)", ptx.code.decode(), re.DOTALL)
    types = {name: re.findall(r"\.param \.([usf]\d+)", parameters) for name, parameters in entries}
    return {
        n: ", ".join(f"{len([*run])} {kind}" for kind, run in groupby(types_of_entry))
        for n, types_of_entry in types.items()
    }


def sizes_of(kernel: str, capability: str, dtype: str) -> tuple[int, ...] | None:
    """Return the head sizes to compile a kernel for; None if it has no head sizes.

    Several are those of bundles in other tests, so that a cache folder has them.
    """
    if kernel == "linear_attention":
        return KEY_DIMS if (capability, dtype) == (HOPPER, "bfloat16") else (128,)
    if kernel in ("attention", "attention_images"):
        return (64,) if dtype == "float16" else (128,)
    return None


def by_code(kernel: str) -> set[str]:
    """Return the oldest compute capability of every version of the code of ``kernel``, and the newest of all.

    Versions differ by conditions on the architecture. GPUs between them compile the same code.
    """
    source = (compiler.SOURCES / f"{kernel}.cu").read_bytes()
    code = b"".join([source, *(content for _, content in compiler._included(source))]).decode()
    conditions = re.findall(r"__CUDA_ARCH__ >= (\d+)(\d)0\b", code)
    return {COMPUTE_CAPABILITIES[0], *(f"{major}.{minor}" for major, minor in conditions), LAST}


# A kernel is compiled in every dtype for one GPU, and in one dtype for every version of its code. Attention takes ten
# seconds per head size with optimizations, so one GPU sees all sizes. Attention over float8 is the same with other
# elements.
COMPILED = [
    (kernel, dtype, capability, sizes_of(kernel, capability, dtype))
    for kernel in compiler.kernel_names()
    for dtype in SUFFIXES
    for capability in COMPUTE_CAPABILITIES
    if capability == HOPPER or (dtype == "bfloat16" and capability in by_code(kernel))
    if not kernel.startswith("experts_") or (capability, dtype) == (HOPPER, "bfloat16")
    if kernel not in ("int8", "float4", "k_quants", "latent_attention", "attention_images") or capability == HOPPER
    if kernel not in ("k_quants", "latent_attention", "attention_images") or dtype != "float16"
    if kernel != "attention_float8"
] + [
    *(("attention", "bfloat16", HOPPER, (size,)) for size in (32, 64, 256, 512)),
    ("attention", "float32", HOPPER, (512,)),
    *(
        ("attention_float8", dtype, capability, head_dims)
        for dtype, capability, head_dims in (
            ("bfloat16", "8.9", (32,)),
            ("bfloat16", HOPPER, (128,)),
            ("float16", HOPPER, (64,)),
            ("float32", HOPPER, (64,)),
        )
    ),
]


# What bundles for most GPUs have. `make test-host-kernels` compiles the others with all optimizations, among them those
# with head sizes, which would take most of the time here, and 4-bit floats of experts, which share the code of 8 bits.
OPTIMIZED = [
    (kernel, "bfloat16", HOPPER, None)
    for kernel in compiler.kernel_names()
    if kernel not in ("attention_float8", "experts_float4") and sizes_of(kernel, HOPPER, "bfloat16") is None
]


@pytest.fixture(scope="module", autouse=True)
def kernels_of_bundles() -> None:
    """They are compiled here."""


@pytest.fixture
def optimizations(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them, which ``quick_compiler`` switches off for other tests."""
    monkeypatch.setattr(nvrtc, "_OPTIONS", tuple(x for x in nvrtc._OPTIONS if not x.startswith("--Ofast-compile")))
    nvrtc.compile_program.cache_clear()


def compile_with_expected_parameters(kernel, dtype, capability, head_dims):
    cubin, ptx = compiler.compile_kernel(kernel, [capability], dtypes=[dtype], head_dims=head_dims)
    assert cubin.file == f"{kernel}.sm_{capability.replace('.', '')}.cubin"
    assert cubin.code.startswith(b"\x7fELF")
    assert entries_of(ptx) == expected(kernel, dtype, head_dims)
    return cubin


@pytest.mark.parametrize(("kernel", "dtype", "capability", "head_dims"), [x for x in COMPILED if x not in OPTIMIZED])
def test_a_kernel_compiles_with_the_parameters_that_launchers_pass(kernel, dtype, capability, head_dims):
    compile_with_expected_parameters(kernel, dtype, capability, head_dims)


def works_in_registers(kernel, dtype, capability, head_dims):
    cubin = compile_with_expected_parameters(kernel, dtype, capability, head_dims)
    spills = re.findall(r"entry function '(\w+)'.*?(\d+) bytes spill stores", cubin.log, re.DOTALL)
    assert {name for name, _ in spills} == set(expected(kernel, dtype, head_dims))
    most = SPILLED_256 if head_dims == (256,) else SPILLED.get(kernel, 0)
    assert {name: size for name, size in spills if int(size) > most} == {}


@pytest.mark.usefixtures("optimizations")
@pytest.mark.parametrize(("kernel", "dtype", "capability", "head_dims"), OPTIMIZED)
def test_a_kernel_works_in_registers(kernel, dtype, capability, head_dims):
    works_in_registers(kernel, dtype, capability, head_dims)


@pytest.mark.usefixtures("optimizations")
def test_instructions_of_hopper_are_in_its_cubin_and_not_in_ptx_for_newer_gpus():
    cubin, ptx = compiler.compile_kernel("float8", ["9.0"], dtypes=["bfloat16"])
    registers = {name: int(count) for name, count in re.findall(r"properties for (\S+)\n.*\n.*Used (\d+)", cubin.log)}
    assert min(registers[f"few_ordered_{name}_bf16"] for name in ORDERED) > 64
    assert ".target sm_90\n" in ptx.code.decode()
    assert "wgmma" not in ptx.code.decode()


def test_selected_kernels_are_compiled_and_all_by_default():
    def entries(**wanted):
        return set(entries_of(compiler.compile_kernel("swiglu", [LAST], **wanted)[-1]))

    assert entries() == {"swiglu_bf16", "swiglu_fp16", "swiglu_fp32"}
    assert entries(dtypes=["float32", "bfloat16"]) == {"swiglu_bf16", "swiglu_fp32"}
    ptx = compiler.compile_kernel("attention", [LAST], dtypes=["float32"], head_dims=[64, 32])[-1]
    assert entries_of(ptx) == expected("attention", "float32", (32, 64))


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({"dtypes": ["int8"]}, r"dtypes: there are kernels for bfloat16, float16, float32, got \['int8'\]"),
        ({"head_dims": [80]}, r"head_dims: there are kernels for 32, 64, 96, 128, 256, 512, got \[80\]"),
    ],
)
def test_kernels_that_do_not_exist_are_refused(wanted, message):
    with pytest.raises(ValueError, match=message):
        compiler.compile_kernel("attention", [LAST], **wanted)


def test_headers_are_found_by_name(tmp_path, monkeypatch):
    (tmp_path / "included.cu").write_text('#include "one.cuh"\nextern "C" __global__ void store(int* x) { *x = ONE; }')
    (tmp_path / "one.cuh").write_text('#include "two.cuh"\n#define ONE (TWO - 1)\n')
    (tmp_path / "two.cuh").write_text("#define TWO 2\n")
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


@pytest.mark.parametrize("capabilities", [[], ["7.5"], ["sm_90"]])
def test_compute_capabilities_that_are_not_supported_are_refused(capabilities):
    with pytest.raises(ValueError, match=r"compute_capabilities: one or more of 8\.0, .* are needed, got"):
        compiler.compile_kernel("verify", capabilities)
