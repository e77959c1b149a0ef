"""How the weights of a model are stored, module by module: what every quantization_config comes down to."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

WHOLE = 0  # of a block: all of the dimension shares a scale
GROUPS = (32, 64, 128)  # inputs per scale that weights of 4 bits may have
Layout = Literal["compressed-tensors", "fp8", "modelopt", "gptq", "gptq_v2", "awq", "mxfp4"]


@dataclass(frozen=True)
class Scheme:
    """How the weight [outputs, inputs] of a product is stored, and what its input is rounded to.

    ``weight``: integers of 4 bits, or floats: *mxfp4* are those of 4 bits whose scales are powers of 2.
    ``layout`` says which tensors hold it. ``block``: outputs and inputs that share a scale, WHOLE for all of them:
    (WHOLE, WHOLE) is a scale per tensor, (1, WHOLE) one per channel, (1, 128) groups. ``symmetric``: no zero points.
    ``inputs``: *whole*, or rounded to float8_e4m3fn with a stored scale (*static*), or with one of each token and
    ``input_block`` values of it (WHOLE: all) that is found while the model runs (*token*).
    """

    weight: Literal["float8_e4m3fn", "int4", "mxfp4"]
    layout: Layout
    block: tuple[int, int]
    symmetric: bool = True
    inputs: Literal["whole", "static", "token"] = "whole"
    input_block: int = WHOLE

    @property
    def packed(self) -> bool:
        """Whether weights are in 4 bits, which a build writes anew."""
        return self.weight != "float8_e4m3fn"

    @property
    def scale(self) -> str:
        """What the scales of a weight in float8_e4m3fn are called, beside "weight"."""
        return "weight_scale_inv" if self.layout == "fp8" else "weight_scale"

    @property
    def input_scale(self) -> str:
        """What the static scale of its inputs is called."""
        return "activation_scale" if self.layout == "fp8" else "input_scale"

    def scales(self, rows: int, inner: int) -> tuple[int, int]:
        """The shape of the scales of a weight [rows, inner]."""
        tall, wide = self.block
        return (1 if tall == WHOLE else -(-rows // tall)), (1 if wide == WHOLE else -(-inner // wide))


@dataclass(frozen=True)
class Quantization:
    """The schemes of a checkpoint; the first of ``rules`` that names a module says how its weight is stored.

    ``method`` is what the config calls the format. ``float8_cache``: the checkpoint has static scales for keys and
    values in float8_e4m3fn.
    """

    method: str
    rules: tuple[tuple[Callable[[str], bool], Scheme], ...]
    float8_cache: bool = False

    @property
    def comes_packed(self) -> bool:
        """Whether some weights are in 4 bits."""
        return any(scheme.packed for _, scheme in self.rules)

    @property
    def has_float8(self) -> bool:
        """Whether some weights are in float8."""
        return any(scheme.weight == "float8_e4m3fn" for _, scheme in self.rules)

    @property
    def comes_in_blocks(self) -> bool:
        """Whether some weights in float8 have scales of blocks, or of blocks of their inputs."""
        wide = [scheme for _, scheme in self.rules if scheme.weight == "float8_e4m3fn"]
        return any(each.block[1] != WHOLE or each.block[0] > 1 or each.input_block != WHOLE for each in wide)

    def notes(self) -> list[str]:
        """What somebody who builds with the weights as they come should know, a line each."""
        wide = [scheme for _, scheme in self.rules if scheme.weight == "float8_e4m3fn"]
        if not wide:
            return []
        inputs = sorted({scheme.inputs for scheme in wide} - {"whole"})
        said = f"weights come as fp8 ({self.method}), their bytes stay where they are"
        return [said + (f"; inputs of products are rounded as they say ({', '.join(inputs)})" if inputs else "")]

    def notes_on_unused_cache_scales(self, kv_dtype: str) -> list[str]:
        """The same of keys and values that a cache holds in ``kv_dtype``, not in float8."""
        said = f"keys and values are held in {kv_dtype}; the checkpoint's scales are not used"
        return [said] if self.float8_cache else []

    def scheme(self, module: str) -> Scheme | None:
        """How the weight of ``module`` ("model.layers.0.mlp.up_proj") is stored; None: as numbers of its own."""
        return next((scheme for names, scheme in self.rules if names(module)), None)
