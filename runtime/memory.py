"""Whether a device has the memory that a bundle's limits ask for: asked before any of it is allocated."""

import os
from math import prod

from tandemrt.engines.bundle import Bundle
from tandemrt.engines.errors import BadBundle, BadRequest, quoted
from tandemrt.engines.options import RuntimeOptions
from tandemrt.plugins.tensors import torch
from tandemrt.runtime.caches.kv_cache import blocks_in_all


def require_memory(bundle: Bundle, options: RuntimeOptions, device: torch.device) -> None:
    """Raise BadBundle, or BadRequest for ``cache_tokens``, where not even an empty ``device`` could hold a round.

    Counted are caches and logits. Weights and the rest come on top, so what passes may still find too little
    memory that is free.
    """
    has, needed = _total(device), _needed(bundle, options)
    if needed <= has:
        return
    if options.cache_tokens is not None:
        raise BadRequest(
            f"cache_tokens: what rounds need must fit the {has} bytes of {str(device)!r}, received "
            f"{quoted(options.cache_tokens)}, with which they need {quoted(needed)}; ask for fewer"
        )
    raise BadBundle(
        f"bundle {bundle.name!r}: cannot run here: its rounds need {quoted(needed)} bytes for caches and logits, and "
        f"{str(device)!r} has {has} in all; build it with smaller limits"
    )


def _needed(bundle: Bundle, options: RuntimeOptions) -> int:
    limits = bundle.limits
    window = limits.window if options.largest_window is None else options.largest_window
    # What writes a draft's context writes the draft's cache.
    contracts = [engine.contract for name, engine in bundle.manifest.engines.items() if name != "context"]
    held = [each for contract in contracts for each in contract.inputs if each.name.startswith("past_")]
    held.append(bundle.manifest.engines["target"].contract["logits"])
    sizes = {"batch": limits.batch, "rows": window + 1, "blocks": blocks_in_all(limits, options.cache_tokens)}
    dtypes: list[torch.dtype] = [getattr(torch, each.dtype) for each in held]
    return sum(prod(each.resolve(sizes)) * dtype.itemsize for each, dtype in zip(held, dtypes, strict=True))


def _total(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
