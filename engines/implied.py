"""What the sizes in a manifest make of the contracts of its engines."""

from tandemrt.engines import contract
from tandemrt.engines.contract import Contract
from tandemrt.engines.dtypes import COMPUTE
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
    vocab = manifest.vocab
    dtype = manifest.engines["draft" if name in ("draft", "propose", "propose_probs") else "target"].dtype
    match name:
        case "adjust":
            return contract.adjust(vocab=vocab, dtype=dtype)
        case "verify" | "verify_probs":
            return contract.verify(vocab=vocab, dtype=dtype, draft_probs=name == "verify_probs")
        case "propose" | "propose_probs":
            return contract.propose(vocab=vocab, dtype=dtype, draft_probs=name == "propose_probs")
    # Layers and heads of a decoder stand in its own contract alone.
    keys = [each for each in manifest.engines[name].contract.inputs if each.name.startswith("past_key.")]
    sizes = [keys[0].shape[1], keys[0].shape[3]] if keys and len(keys[0].shape) == 4 else [1, 1]
    kv_heads, head_dim = (size if isinstance(size, int) else 1 for size in sizes)
    return contract.decoder(
        layers=len(keys),
        kv_heads=kv_heads,
        head_dim=head_dim,
        capacity=manifest.limits.capacity,
        vocab=vocab,
        dtype=dtype,
        cache="linear" if manifest.limits.cache_blocks is None else "paged",
    )
