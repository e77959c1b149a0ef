"""A decoder cut at its kernels: the names of what passes between the pieces, used by exporter and runtime alike.

Every layer has two kernels, ``window_attention`` (qkv.i to mixed.i) and ``swiglu`` (gate_up.i to activated.i). Piece k
is what stands between two of them, so a model of L layers has 2L + 1; the stream of residuals goes around the kernels:

==============================  ====================================  =======================  =================
piece                           inputs                                outputs                  then
==============================  ====================================  =======================  =================
constants, once                 none                                  cosine, sine, norms
0                               token_ids                             hidden.0, qkv.0          window_attention
2i + 1                          hidden.i, mixed.i                     residual.i, gate_up.i    swiglu
2i, 0 < i < L                   residual.i-1, activated.i-1           hidden.i, qkv.i          window_attention
2L, the last                    residual.L-1, activated.L-1           logits                   nothing
==============================  ====================================  =======================  =================

All are [batch, query, …] in the compute dtype: hidden and residual hidden size, qkv (heads + 2 * kv_heads) * head_dim,
mixed heads * head_dim, gate_up 2 * intermediate, activated intermediate. From piece 2L - 1 on, which takes score_rows
as well, they are [batch, rows, …]: the rows without logits end at the last attention. cosine and sine are
[positions, head_dim // 2]; q_norm.i and k_norm.i [head_dim] are there if the model norms its queries and keys.
"""

COSINE, SINE = "cosine", "sine"
SCORE_ROWS = "score_rows"


def hidden(layer: int) -> str:
    """The stream of residuals in front of a layer's attention."""
    return f"hidden.{layer}"


def qkv(layer: int) -> str:
    """Packed queries, keys and values: what a layer's attention reads."""
    return f"qkv.{layer}"


def mixed(layer: int) -> str:
    """What a layer's attention gives."""
    return f"mixed.{layer}"


def residual(layer: int) -> str:
    """The stream of residuals behind a layer's attention."""
    return f"residual.{layer}"


def gate_up(layer: int) -> str:
    """The packed products of a layer's feed-forward block: what its swiglu reads."""
    return f"gate_up.{layer}"


def activated(layer: int) -> str:
    """What a layer's swiglu gives."""
    return f"activated.{layer}"


def q_norm(layer: int) -> str:
    """The weight of a layer's RMS norm of queries."""
    return f"q_norm.{layer}"


def k_norm(layer: int) -> str:
    """The weight of a layer's RMS norm of keys."""
    return f"k_norm.{layer}"
