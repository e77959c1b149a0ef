"""Every C kernel, compiled for 64-bit ARM and run by qemu, equals its reference, and this machine's bits where stated.

Needs the packages gcc-aarch64-linux-gnu, libc6-dev-arm64-cross and qemu-user of Debian; ``make test-arm``.
"""

import subprocess
from collections.abc import Callable, Sequence
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest

from tandemrt.engines.contract.operators import SCHEMAS
from tandemrt.plugins.implementations import reference
from tandemrt.plugins.onnxruntime import custom_operators
from tests.engine.implementation_cases import KINDS, NEAR, Case, cases

ELEMENT_TYPES = {"float32": 1, "uint8": 2, "int8": 3, "int64": 7, "float16": 10, "bfloat16": 16}  # of onnxruntime
# ARM's processors fuse a product and a sum, as x86's with AVX2 do. The other kernels leave that to the compiler.
EQUAL_BITS = ("low_bit_int8_matmul", "tiled_matmul")
# The oldest processor of the instruction set, and one with dot products, for which NEON has its own rows.
PROCESSORS = {"baseline": "cortex-a57", "dot products": "max"}

Run = Callable[[str, Case], list[np.ndarray]]


def compiled(folder: Path, compiler: str, *emulator: str) -> Run:
    """Compile the kernels with run_operator.c, and return the function that runs an operator."""
    folder.mkdir()
    program = folder / "run_operator"
    sources = [Path(__file__).with_name("run_operator.c")]
    sources += [custom_operators._FOLDER / name for name in custom_operators._SOURCES]
    options = [*custom_operators._OPTIONS, f"-I{custom_operators._FOLDER}", "-static", "-Werror", "-Wno-psabi"]
    subprocess.run([compiler, *options, "-o", program, *sources, "-lm"], check=True)

    def run(operator: str, case: Case) -> list[np.ndarray]:
        attributes = [f"{name}={value}" for name, value in case.attributes.items()]
        outputs = case.outputs or len(SCHEMAS[operator].outputs)
        command = [*emulator, program, operator, str(outputs), *attributes]
        answer = subprocess.run(command, input=written(operator, case), stdout=subprocess.PIPE, check=True, timeout=60)
        return read(BytesIO(answer.stdout), outputs)

    return run


def written(operator: str, case: Case) -> bytes:
    """Return the inputs in the order of the operator, as run_operator.c reads them."""
    inputs = [case.inputs.get(binding.name) for binding in SCHEMAS[operator].inputs]
    while inputs[-1] is None:
        inputs.pop()
    data = np.int64(len(inputs)).tobytes()
    for array in inputs:
        if array is None:
            data += np.int64(0).tobytes()
        else:
            sizes: Sequence[int] = (ELEMENT_TYPES[str(array.dtype)], array.ndim, *array.shape)
            data += np.array(sizes, np.int64).tobytes() + np.ascontiguousarray(array).tobytes()
    return data


def read(stream: BytesIO, outputs: int) -> list[np.ndarray]:
    arrays = []
    for _ in range(outputs):
        [rank] = np.frombuffer(stream.read(8), np.int64)
        shape = np.frombuffer(stream.read(8 * rank), np.int64)
        arrays.append(np.frombuffer(stream.read(4 * shape.prod()), np.float32).reshape(shape))
    assert not stream.read()
    return arrays


@pytest.fixture(scope="module", params=PROCESSORS)
def on_arm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    emulator = ("qemu-aarch64", "-cpu", PROCESSORS[request.param])
    return compiled(tmp_path_factory.mktemp("arm") / "kernels", "aarch64-linux-gnu-gcc", *emulator)


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return compiled(tmp_path_factory.mktemp("here") / "kernels", "cc")


@pytest.mark.parametrize("operator", custom_operators.OPERATORS)
def test_a_kernel_equals_its_reference_on_arm(on_arm: Run, here: Run, operator: str) -> None:
    for dtype in KINDS if operator == "tiled_matmul" else ["float32"]:
        for case in cases(operator, dtype):
            results = reference(operator)(**case.inputs, **case.attributes)
            wanted = [results] if isinstance(results, np.ndarray) else list(results)
            outputs = on_arm(operator, case)
            for array, expected in zip(outputs, wanted, strict=False):
                near = max(NEAR[str(each)] for each in (expected.dtype, case.kind))
                np.testing.assert_allclose(array, expected.astype(np.float32), rtol=near, atol=near)
            if operator in EQUAL_BITS:
                for array, other in zip(outputs, here(operator, case), strict=True):
                    np.testing.assert_array_equal(array.view(np.uint32), other.view(np.uint32))
