"""Check that a manifest's contracts are those that its sizes imply."""

from typing import Any

from tandemrt.engines.bundle.manifest import EngineName, Manifest
from tandemrt.engines.contract import contract
from tandemrt.engines.contract.binding import Binding
from tandemrt.engines.contract.contract import Contract, RecurrentState
from tandemrt.engines.contract.draft_kinds import DRAFT_LAYERS
from tandemrt.engines.contract.dtypes import COMPUTE, FLOAT8
from tandemrt.engines.validation.errors import BadBundle, clipped


def require_implied(manifest: Manifest) -> None:
    """Raise BadBundle if an engine's contract differs from the one that the manifest's sizes imply.

    A manifest with a valid digest may still be wrong, and the runtime allocates and binds by its contracts.
    """
    for name, engine in manifest.engines.items():
        if engine.dtype not in COMPUTE:
            violation = f"dtype must be one of {', '.join(COMPUTE)}; got {clipped(engine.dtype)}"
        elif engine.contract == (implied := _implied(manifest, name)):
            continue
        else:
            lines = implied.differences(engine.contract)
            violation = (
                f"contract must follow from limits, vocab and dtype; {lines[0] if lines else 'got other aliases'}"
            )
        raise BadBundle(f"bundle {manifest.name!r}: engines.{name}.{clipped(violation)}. Build the bundle again")


def _implied(manifest: Manifest, name: EngineName) -> Contract:
    vocab, draft, draft_vocab = manifest.vocab, manifest.draft, manifest.draft.draft_vocab
    drafts = name in draft.engines
    dtype = manifest.engines["draft" if drafts else "target"].dtype
    match name:
        case "adjust":
            return contract.adjust(vocab=vocab, dtype=dtype)
        case "verify" | "verify_probs":
            return contract.verify(vocab=vocab, dtype=dtype, draft_probs=name == "verify_probs")
        case "propose" | "propose_probs":
            partial, probs = draft_vocab is not None, name == "propose_probs"
            return contract.propose(vocab=draft_vocab or vocab, dtype=dtype, draft_probs=probs, target_ids=partial)
        case "vision" if manifest.vision is not None:
            return contract.vision(manifest.vision, _width(manifest, "target", "image_states"))
    hidden = _width(manifest, "draft", "states")
    features = _width(manifest, "target", "features") if draft.traits.features else 0
    if name == "fuse":
        return contract.fuse(features=features, hidden=hidden, dtype=dtype)
    row_states = _width(manifest, "draft", "row_states", 0)
    if name == "markov":
        memory = _width(manifest, "markov", "memory", 0)
        return contract.markov(vocab=draft_vocab or vocab, dtype=dtype, row_states=row_states, memory=memory)
    sizes = _decoder_sizes(manifest, name)
    if name == "context":
        return contract.context(features=features, **sizes)
    if name == "draft" and draft.traits.reads_cache:  # of layers of the target
        of_target = _decoder_sizes(manifest, "target")["heads"]
        caches = {layer: of_target[layer] for layer in sizes["heads"] if layer in of_target}
        read = {field: sizes[field] for field in ("capacity", "vocab", "dtype", "cache")}
        return contract.assistant(caches=caches, hidden=features, **read)
    if name in DRAFT_LAYERS and "fuse" in manifest.engines:
        parallel, further = draft.traits.parallel, DRAFT_LAYERS[1] in manifest.engines
        return contract.draft_head(hidden=hidden, parallel=parallel, further=further, **sizes)
    if name == "draft" and "markov" in manifest.engines:
        return contract.block(row_states=row_states, **sizes)
    recurrent, history = _recurrent(manifest.engines[name].contract)
    features = features if name == "target" else 0
    if name == "target" and manifest.vision is not None:
        vision = manifest.vision
        sizes |= {"position_rows": vision.position_rows, "image_ends": vision.both_ways}
        sizes["image_width"] = _width(manifest, "target", "image_states")
    return contract.decoder(**sizes, features=features, recurrent=recurrent, history=history)


def _decoder_sizes(manifest: Manifest, name: EngineName) -> dict[str, Any]:
    """Return the sizes that all decoders have. The manifest has their layers and heads in their contract alone."""
    stated, draft, cache = manifest.engines[name].contract, manifest.draft, manifest.limits.cache
    draft_vocab = draft.draft_vocab if name == "draft" else None
    keys = [each for each in stated.inputs if each.name.startswith("past_key.")]
    heads = {int(each.name.rpartition(".")[2]): _heads(each) for each in keys if each.name[9:].isdecimal()}
    kv_heads, head_dim = next(iter(heads.values()), (1, 1))
    recurrent, _ = _recurrent(stated)
    sizes: dict[str, Any] = {
        "layers": len(keys) + len(recurrent.keys() - heads.keys()),
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "heads": heads,
        "capacity": manifest.limits.capacity,
        "vocab": draft_vocab or manifest.vocab,
        "dtype": manifest.engines["draft" if name in draft.engines else "target"].dtype,
        "cache": cache,
        "latent": bool(keys) and not any(each.name.startswith("past_value.") for each in stated.inputs),
    }
    if name in ("target", "draft") and cache == "paged" and keys and keys[0].dtype == FLOAT8:
        sizes["kv_dtype"] = FLOAT8
    return sizes


def _heads(keys: Binding) -> tuple[int, int]:
    """Return the KV heads and the head size of a layer's keys; 1 for an invalid size."""
    kv_heads, head_dim = (keys.shape[1], keys.shape[3]) if len(keys.shape) == 4 else (1, 1)
    return kv_heads if isinstance(kv_heads, int) else 1, head_dim if isinstance(head_dim, int) else 1


def _recurrent(decoder: Contract) -> tuple[dict[int, RecurrentState], int]:
    """Return the recurrent layers of a decoder, and of how many tokens they keep the inputs."""
    shapes = {
        binding.name: [size if isinstance(size, int) else 1 for size in binding.shape] for binding in decoder.inputs
    }
    layers: dict[int, RecurrentState] = {}
    history = 0
    for name, shape in shapes.items():
        kind, _, layer = name.partition(".")
        if kind == "past_recent" and layer.isdecimal() and len(shape) == 3:
            state = shapes.get(f"past_state.{layer}", [1])
            history = shape[1]
            layers[int(layer)] = RecurrentState(tuple(state[1:]), shape[2])
    return layers, history


def _width(manifest: Manifest, engine: EngineName, name: str, absent: int = 1) -> int:
    """Return the last dimension of the binding ``name`` in an engine's contract.

    Returns 1 for an invalid dimension, and ``absent`` if there is no such binding.
    """
    bindings = manifest.engines[engine].contract if engine in manifest.engines else None
    widths = [b.shape[-1] for b in (*bindings.inputs, *bindings.outputs) if b.name == name] if bindings else []
    if not widths:
        return absent
    return widths[0] if isinstance(widths[0], int) and widths[0] > 0 else 1
