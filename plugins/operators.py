"""Names and enumerations that all faces of the operators share; the faces are listed in plugins/faces.py."""

from enum import IntEnum

DOMAIN = "tandemrt"
HEAD_DIMS = (32, 64, 128)  # that window_attention has kernels for
# Of experts: how many there may be, and a token may choose; what hidden size and width must be a multiple of.
MOST_EXPERTS, MOST_PER_TOKEN, HIDDEN_STEP, WIDTH_STEP = 512, 32, 16, 8


class Rule(IntEnum):
    """How a drafted token is accepted; chosen per request, mixed freely in a batch (docs/design.md, section 4)."""

    COUPLED = 0  # draw from the target with position-keyed noise, accept while it equals the draft
    REJECTION = 1  # accept with probability min(1, p/q), else draw from the residual


class Purpose(IntEnum):
    """The stream of noise a draw uses. Streams never meet, so no draw can bias another one."""

    SAMPLE = 0
    ACCEPT = 1
    RESIDUAL = 2
    DRAFT = 3
