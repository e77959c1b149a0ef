"""What the sizes in a manifest make of the contracts of its engines."""

from typing import Any

from tandemrt.engines import contract
from tandemrt.engines.contract import Contract
from tandemrt.engines.drafts import DRAFT_LAYERS, DRAFTS
from tandemrt.engines.dtypes import COMPUTE, FLOAT8
from tandemrt.engines.errors import BadBundle, clipped
from tandemrt.engines.manifest import EngineName, Manifest


def require_implied(manifest: Manifest) -> None:
    """Raise BadBundle where the contract of an engine is another one than the manifest's sizes ask for.

    A signed manifest may say anything; what is allocated and bound by its contracts must be what rounds are made of.
    """
    for name, engine in manifest.engines.items():
        if engine.dtype not in COMPUTE:
            found = f"dtype must be one of {', '.join(COMPUTE)}; got {clipped(engine.dtype)}"
        elif engine.contract == (implied := _implied(manifest, name)):
            continue
        else:
            lines = implied.differences(engine.contract)
            found = f"contract must follow from limits, vocab and dtype; {lines[0] if lines else 'got other aliases'}"
        raise BadBundle(f"bundle {manifest.name!r}: engines.{name}.{clipped(found)}. Build the bundle again")


def _implied(manifest: Manifest, name: EngineName) -> Contract:
    vocab, known = manifest.vocab, manifest.draft.vocab
    drafts = name in manifest.draft.engines
    dtype = manifest.engines["draft" if drafts else "target"].dtype
    match name:
        case "adjust":
            return contract.adjust(vocab=vocab, dtype=dtype)
        case "verify" | "verify_probs":
            return contract.verify(vocab=vocab, dtype=dtype, draft_probs=name == "verify_probs")
        case "propose" | "propose_probs":
            narrow = known is not None
            probs = name == "propose_probs"
            return contract.propose(vocab=known or vocab, dtype=dtype, draft_probs=probs, target_ids=narrow)
    hidden = _width(manifest, "draft", "states")
    features = _width(manifest, "target", "features") if DRAFTS[manifest.draft.kind].features else 0
    if name == "fuse":
        return contract.fuse(features=features, hidden=hidden, dtype=dtype)
    row_states = _width(manifest, "draft", "row_states", 0)
    if name == "markov":
        memory = _width(manifest, "markov", "memory", 0)
        return contract.markov(vocab=known or vocab, dtype=dtype, row_states=row_states, memory=memory)
    # Layers and heads of a decoder stand in its own contract alone.
    keys = [each for each in manifest.engines[name].contract.inputs if each.name.startswith("past_key.")]
    shape = [keys[0].shape[1], keys[0].shape[3]] if keys and len(keys[0].shape) == 4 else [1, 1]
    kv_heads, head_dim = (size if isinstance(size, int) else 1 for size in shape)
    sizes: dict[str, Any] = {
        "layers": len(keys),
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "capacity": manifest.limits.capacity,
        "vocab": known or vocab if name == "draft" else vocab,
        "dtype": dtype,
        "cache": "linear" if manifest.limits.cache_blocks is None else "paged",
    }
    if name in ("target", "draft") and sizes["cache"] == "paged" and keys and keys[0].dtype == FLOAT8:
        sizes["kv_dtype"] = FLOAT8
    if name == "context":
        return contract.context(features=features, **sizes)
    if name in DRAFT_LAYERS and "fuse" in manifest.engines:
        parallel, further = DRAFTS[manifest.draft.kind].parallel, manifest.draft.layers is not None
        return contract.draft_head(hidden=hidden, parallel=parallel, further=further, **sizes)
    if name == "draft" and "markov" in manifest.engines:
        return contract.block(row_states=row_states, **sizes)
    return contract.decoder(**sizes, features=features if name == "target" else 0)


def _width(manifest: Manifest, engine: EngineName, name: str, absent: int = 1) -> int:
    """The last dimension of a binding as the engine's own contract has it; 1 where that makes no sense, ``absent``
    where it has none."""
    bindings = manifest.engines[engine].contract if engine in manifest.engines else None
    found = [b.shape[-1] for b in (*bindings.inputs, *bindings.outputs) if b.name == name] if bindings else []
    if not found:
        return absent
    return found[0] if isinstance(found[0], int) and found[0] > 0 else 1
