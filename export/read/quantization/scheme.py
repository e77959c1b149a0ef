"""How the weights of a model are stored, module by module: the common form of all quantization configs."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

FULL_DIM = 0  # in a group shape: one scale for the complete dimension
GROUPS = (32, 64, 128)  # supported group sizes (inputs per scale) of 4-bit weights
Layout = Literal[
    "compressed-tensors",
    "integers",
    "fp8",
    "modelopt",
    "gptq",
    "gptq_v2",
    "awq",
    "awq_gemv",
    "mxfp4",
    "bitsandbytes",
    "gguf",
]
# Types that are no format with another name.
GgufType = Literal["Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS"]
Weight = Literal["float8_e4m3fn", "int4", "int8", "mxfp4", "nvfp4", "table4", "mxfp8"] | GgufType
BITS = {"int4": 4, "int8": 8}  # of integer weights
# Weights that a build writes in another layout, which matmuls read; and their names in messages.
_PACKED = {"int4": "4-bit integers", "int8": "8-bit integers", "mxfp4": "MXFP4", "nvfp4": "NVFP4"}
_PACKED |= {kind: kind for kind in get_args(GgufType)}
_WITHOUT_MATMULS = {"table4": "4-bit floats of bitsandbytes", "mxfp8": "MXFP8"}


@dataclass(frozen=True)
class Scheme:
    """How the weight [outputs, inputs] of a matmul is stored, and how its input is rounded.

    ``weight``: *int4* and *int8* are integers, *mxfp4* floats of 4 bits with powers of 2 as scales, *nvfp4* floats of 4
    bits with float8_e4m3fn scales and one more scale per tensor, *table4* positions in a table of 16 floats, *mxfp8*
    float8_e4m3fn with powers of 2 as scales, the others types of GGUF.
    ``layout``: the tensors that store the weight; *integers* is one signed byte per value, *gguf* the rows of bytes of
    a GGUF file. ``group_shape``: the outputs
    and inputs per scale, FULL_DIM for all: (FULL_DIM, FULL_DIM) is one scale per tensor, (1, FULL_DIM) one per channel,
    (1, 128) groups. ``symmetric``: there are no zero points. ``inputs``: *unquantized*; *static*: rounded to
    float8_e4m3fn with a stored scale; *token*: rounded to float8_e4m3fn with a scale computed at run time per token and
    ``input_group`` values (FULL_DIM: all). ``unrounded``: how the config rounds inputs that a build leaves unquantized,
    for its notes; "": it does not.
    """

    weight: Weight
    layout: Layout
    group_shape: tuple[int, int]
    symmetric: bool = True
    inputs: Literal["unquantized", "static", "token"] = "unquantized"
    input_group: int = FULL_DIM
    unrounded: str = ""

    @property
    def packed(self) -> bool:
        """Whether a build writes the weight in another layout (LowBitFormat)."""
        return self.weight in _PACKED

    @property
    def title(self) -> str:
        """The name of the weight's format in messages."""
        return {**_PACKED, **_WITHOUT_MATMULS}.get(self.weight, self.weight)

    @property
    def scale(self) -> str:
        """The last part of the name of a float8_e4m3fn or MXFP8 weight's scale tensor."""
        return "weight_scale_inv" if self.layout == "fp8" else "weight_scale"

    @property
    def input_scale(self) -> str:
        """The last part of the name of the tensor with the static scale of inputs."""
        return "activation_scale" if self.layout == "fp8" else "input_scale"

    def scales(self, rows: int, inner: int) -> tuple[int, int]:
        """Return the shape of the scales of a weight [rows, inner]."""
        tall, wide = self.group_shape
        return (1 if tall == FULL_DIM else -(-rows // tall)), (1 if wide == FULL_DIM else -(-inner // wide))


@dataclass(frozen=True)
class Quantization:
    """The schemes of a checkpoint: the first of ``rules`` that matches a module gives the scheme of its weight.

    ``method``: the config's name of the format. ``float8_cache``: the checkpoint has static scales for keys and values
    in float8_e4m3fn. ``remarks``: what a build computes in another way than the config says, for its notes.
    """

    method: str
    rules: tuple[tuple[Callable[..., bool], Scheme], ...]
    float8_cache: bool = False
    remarks: tuple[str, ...] = ()

    @property
    def is_packed(self) -> bool:
        """Whether a build writes some weights in another layout."""
        return any(scheme.packed for _, scheme in self.rules)

    @property
    def without_matmuls(self) -> str | None:
        """The name of weights that no backend multiplies by; None: there are none. They must be dequantized."""
        return next((scheme.title for _, scheme in self.rules if scheme.weight in _WITHOUT_MATMULS), None)

    def dequantized(self) -> "Quantization | None":
        """Return what is left after the weights are dequantized: the scales of keys and values, if there are any."""
        return Quantization(self.method, (), float8_cache=True) if self.float8_cache else None

    @property
    def has_float8(self) -> bool:
        """Whether some weights are in float8."""
        return any(scheme.weight == "float8_e4m3fn" for _, scheme in self.rules)

    @property
    def has_group_scales(self) -> bool:
        """Whether some float8 weights have one scale per group of weights, or per group of inputs."""
        float8 = [scheme for _, scheme in self.rules if scheme.weight == "float8_e4m3fn"]
        return any(
            each.group_shape[1] != FULL_DIM or each.group_shape[0] > 1 or each.input_group != FULL_DIM
            for each in float8
        )

    def notes(self) -> list[str]:
        """Return notes for builds that keep the weights' values, one line each."""
        left = sorted({scheme.unrounded for _, scheme in self.rules} - {""})
        notes = [f"inputs of matmuls stay unquantized; the checkpoint's config rounds them to {', '.join(left)}"]
        return [*self._float8_notes(), *(notes if left else []), *self.remarks]

    def _float8_notes(self) -> list[str]:
        float8 = [scheme for _, scheme in self.rules if scheme.weight == "float8_e4m3fn"]
        if not float8:
            return []
        inputs = sorted({scheme.inputs for scheme in float8} - {"unquantized"})
        note = f"weights are stored as fp8 ({self.method}), their bytes stay where they are"
        return [note + (f"; inputs of matmuls are rounded as the config says ({', '.join(inputs)})" if inputs else "")]

    def notes_on_unused_cache_scales(self, kv_dtype: str) -> list[str]:
        """Return notes for a cache with keys and values in ``kv_dtype``, which is not float8."""
        note = f"keys and values are held in {kv_dtype}; the checkpoint's scales are not used"
        return [note] if self.float8_cache else []

    def scheme(self, *names: str) -> Scheme | None:
        """Return how the weight of a module is stored; None: unquantized.

        ``names``: its name in the graph ("model.layers.0.mlp.up_proj"), and that in the checkpoint if it differs.
        """
        return next((scheme for matches, scheme in self.rules if matches(*names)), None)
