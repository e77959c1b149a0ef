"""Read attention in chunks or by an index: the longest text for which it equals ordinary attention."""

from tandemrt.engines.validation.errors import BadCheckpoint, quoted
from tandemrt.export.read.fields import Fields


def dual_chunk(fields: Fields) -> int:
    """Return the longest text for which dual-chunk attention equals ordinary attention (Qwen2.5-1M)."""
    if (chunked := fields.get("dual_chunk_attention_config")) is None:
        return 2**31 - 1
    if not isinstance(chunked, dict):
        raise BadCheckpoint(f"config.json: dual_chunk_attention_config should be an object, it is {quoted(chunked)}")
    inner = Fields(chunked, "config.json, dual_chunk_attention_config")
    sizes = [inner.integer(name) for name in ("chunk_size", "local_size", "original_max_position_embeddings")]
    inner.finish()
    if sizes[0] <= sizes[1]:
        raise BadCheckpoint(f"{inner.where}: chunk_size should be above local_size, {sizes[1]}, it is {sizes[0]}")
    return min(sizes[0] - sizes[1], sizes[2])


def attention_chunk(fields: Fields) -> int:
    """Return the length of a chunk, beyond which most layers of Llama 4 do not look."""
    return 2**31 - 1 if fields.get("attention_chunk_size") is None else fields.integer("attention_chunk_size")


def chosen_keys(fields: Fields) -> int:
    """Return the number of keys that the index of DeepSeek-V3.2 chooses for a token: no shorter text leaves one out."""
    return fields.integer("index_topk", 2048)
