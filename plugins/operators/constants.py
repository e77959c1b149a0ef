"""Names and enumerations that all implementations of the operators share."""

from collections.abc import Mapping
from enum import IntEnum
from math import pi

DOMAIN = "tandemrt"
# Head sizes that the kernels of window_attention support; those of the widest take no cache in float8.
HEAD_DIMS, WIDE_HEAD_DIM = (32, 64, 128, 256, 512), 512
IMAGE_ATTENTION_KERNELS = "attention_images"  # file of those for tokens of images that attend both ways
LATENT = (512, 64)  # values of a latent vector and of a rotated key that the kernels of latent_attention support
# Limits of the kernels of linear_attention: sizes of a key, by the delta rule and without it, of which a value's is a
# multiple, tokens of a convolution.
DELTA_KEY_DIMS, KEY_DIMS, VALUE_DIM_MULTIPLE, MAX_KERNEL = (32, 64, 96, 128), (32, 64, 96, 128, 256), 16, 8


class OutputNorm(IntEnum):
    """The norm of a group of outputs of linear_attention."""

    NONE = 0
    BEFORE_GATE = 1
    AFTER_GATE = 2


# Limits of experts; hidden size and expert width must be multiples of the last two.
MAX_EXPERTS, MAX_EXPERTS_PER_TOKEN, HIDDEN_MULTIPLE, WIDTH_MULTIPLE = 512, 32, 16, 8
LOW_BIT_OUTPUTS = 8  # the outputs of matmuls with weights of 4 or 8 bits on a GPU are multiples of this
LOW_BIT_EXPERTS_MULTIPLE = 32  # of hidden size and width, for experts with weights of 4 or 8 bits


# Activations of experts, as attributes of their operators (plugins/reference/experts.py). The tanh of gelu is a sigmoid
# of twice its argument.
_ROOT = (2 / pi) ** 0.5
ACTIVATIONS: Mapping[str, Mapping[str, float]] = {
    "silu": {"alpha": 1.0, "cubic": 0.0, "limit": 0.0, "offset": 0.0},
    "gelu_tanh": {"alpha": 2 * _ROOT, "cubic": 2 * _ROOT * 0.044715, "limit": 0.0, "offset": 0.0},
}

# The attributes of experts with silu, whose gates precede their ups, and none of which is shared.
SILU_EXPERTS: Mapping[str, float] = {"shared_columns": 0, "interleaved": 0, **ACTIVATIONS["silu"]}


class Rule(IntEnum):
    """Verification rule of a request. A batch may mix both rules (docs/design.md)."""

    COUPLED = 0  # draw from the target with position-keyed noise, accept while the draw equals the draft
    REJECTION = 1  # accept with probability min(1, p/q), else draw from the residual


class Purpose(IntEnum):
    """Random stream of a draw. Streams are disjoint, so draws are independent."""

    SAMPLE = 0
    ACCEPT = 1
    RESIDUAL = 2
    DRAFT = 3
