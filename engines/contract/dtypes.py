"""Element types of tensors: the project's numpy-style names and their names in other libraries."""

# TensorProto.DataType, also of onnx-ir and of onnxruntime's IO binding.
ONNX = {
    "float32": 1,
    "uint8": 2,
    "int8": 3,
    "int32": 6,
    "int64": 7,
    "bool": 9,
    "float16": 10,
    "uint32": 12,
    "bfloat16": 16,
    "float8_e4m3fn": 17,  # of weights, keys and values, and what inputs of matmuls are rounded to
}
BYTES = {
    "float32": 4,
    "uint8": 1,
    "int8": 1,
    "int32": 4,
    "int64": 8,
    "bool": 1,
    "float16": 2,
    "uint32": 4,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
}
# Suffix of a kernel's name, by the dtype that it computes in.
KERNEL_SUFFIX = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
COMPUTE = ("float32", "float16", "bfloat16")  # dtypes that a decoder computes in
BITS = {"int8": 8, "int4": 4}  # quantized weights of a decoder: bits
HALF = ("float16", "bfloat16")
FLOAT8 = "float8_e4m3fn"
KV_DTYPES = {"float8_e4m3": FLOAT8}  # quantized keys and values: name in a recipe -> dtype


def computed_in(dtype: str, *, paged: bool) -> str:
    """Return the dtype that a decoder of ``dtype`` computes in.

    Quantized weights compute in bfloat16 over a paged cache (on a GPU), else in float32.
    """
    return dtype if dtype not in BITS else "bfloat16" if paged else "float32"


def from_onnx(element_type: int) -> str:
    """Return the name of TensorProto.DataType ``element_type``, or "ONNX type N" for an unknown one."""
    return _NAMES.get(element_type, f"ONNX type {element_type}")


_NAMES = {number: name for name, number in ONNX.items()}
