"""A decoder cut at its attention: the names of what passes between the pieces, used by exporter and runtime alike.

Layer i's attention stands between segment i and segment i + 1. It reads ``qkv.i`` and gives ``mixed.i``; the residual
stream goes around it as ``hidden.i``:

===========================  ==========================================  =====================
piece                        inputs                                      outputs
===========================  ==========================================  =====================
constants                    none                                        cosine, sine, norms
segment 0                    token_ids                                   hidden.0, qkv.0
segment i, 0 < i < layers    hidden.i-1, mixed.i-1                       hidden.i, qkv.i
segment ``layers``, the last hidden.i-1, mixed.i-1, score_rows           logits
===========================  ==========================================  =====================

hidden.i is [batch, query, hidden], qkv.i [batch, query, (heads + 2 * kv_heads) * head_dim], mixed.i
[batch, query, heads * head_dim], all in the compute dtype; cosine and sine [positions, head_dim // 2], q_norm.i and
k_norm.i [head_dim].
"""

COSINE, SINE = "cosine", "sine"


def hidden(layer: int) -> str:
    """The residual stream in front of layer ``layer``'s attention."""
    return f"hidden.{layer}"


def qkv(layer: int) -> str:
    """Packed queries, keys and values of layer ``layer``, what its attention reads."""
    return f"qkv.{layer}"


def mixed(layer: int) -> str:
    """What layer ``layer``'s attention gives."""
    return f"mixed.{layer}"


def q_norm(layer: int) -> str:
    """The weight of the RMS norm of queries, a constant."""
    return f"q_norm.{layer}"


def k_norm(layer: int) -> str:
    """The weight of the RMS norm of keys, a constant."""
    return f"k_norm.{layer}"
