"""The element types of tensors: a numpy-style name is what the project says; what others call it stands here."""

ONNX = {
    "float32": 1,
    "uint8": 2,
    "int32": 6,
    "int64": 7,
    "bool": 9,
    "float16": 10,
    "uint32": 12,
    "bfloat16": 16,
    "float8_e4m3fn": 17,  # of weights, keys and values, and what inputs of products are rounded to
}  # TensorProto.DataType, which onnx-ir and onnxruntime's IO binding use too
BYTES = {
    "float32": 4,
    "uint8": 1,
    "int32": 4,
    "int64": 8,
    "bool": 1,
    "float16": 2,
    "uint32": 4,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
}
TENSORRT = {
    "float32": "FLOAT",
    "float16": "HALF",
    "bfloat16": "BF16",
    "int64": "INT64",
    "int32": "INT32",
    "bool": "BOOL",
}  # the members of its DataType
# Of a kernel's name, by the dtype it computes in.
KERNEL_SUFFIX = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
COMPUTE = ("float32", "float16", "bfloat16")  # what a decoder may compute in
BITS = {"int8": 8, "int4": 4}  # what the weights of a decoder may be rounded to, beside
HALF = ("float16", "bfloat16")
FLOAT8 = "float8_e4m3fn"
KV_DTYPES = {"float8_e4m3": FLOAT8}  # what keys and values may be rounded to, as recipes call it


def computed_in(dtype: str, *, paged: bool) -> str:
    """What a decoder of ``dtype`` computes in: whose weights are rounded in bfloat16 over a paged cache, which a GPU
    has, else in float32."""
    return dtype if dtype not in BITS else "bfloat16" if paged else "float32"


def from_onnx(element_type: int) -> str:
    """The name of TensorProto.DataType ``element_type``; one that is not ours is said as a number."""
    return _NAMES.get(element_type, f"ONNX type {element_type}")


def from_onnxruntime(written: str) -> str:
    """The name of what a session calls ``tensor(float)``; as it is written where it is not ours."""
    return _SESSION.get(written, written)


def from_tensorrt(member: str) -> str:
    """The name of the member ``HALF`` of TensorRT's DataType; as it is written where it is not ours."""
    return _TENSORRT.get(member, member)


_NAMES = {number: name for name, number in ONNX.items()}
_SPELLED = {"float32": "float", "float8_e4m3fn": "float8e4m3fn"}  # by onnxruntime, where it is not as here
_SESSION = {f"tensor({_SPELLED.get(name, name)})": name for name in ONNX}
_TENSORRT = {written: name for name, written in TENSORRT.items()}
