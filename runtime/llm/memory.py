"""Check, before allocation, that a device has memory for the KV caches and logits of a bundle."""

from math import prod

from tandemrt.engines.bundle.bundle import Bundle
from tandemrt.engines.contract.contract import num_snapshots
from tandemrt.engines.options.options import RuntimeOptions
from tandemrt.engines.validation.errors import BadBundle, BadRequest, quoted
from tandemrt.plugins.tensors import torch
from tandemrt.plugins.tensors.devices.lookup import device_of
from tandemrt.runtime.caches.kv_cache import num_cache_blocks
from tandemrt.runtime.caches.recurrent import STATES


def require_memory(bundle: Bundle, options: RuntimeOptions, device: torch.device) -> None:
    """Raise BadBundle, or BadRequest for ``cache_tokens``, if the total memory of ``device`` is too small.

    Only caches and logits are counted, not weights and other buffers, so the allocation may still fail.
    """
    has, needed = device_of(device).total_memory(), _needed(bundle, options)
    if needed <= has:
        return
    if options.cache_tokens is not None:
        raise BadRequest(
            f"cache_tokens: caches and logits must fit into the {has} bytes of {str(device)!r}, received "
            f"{quoted(options.cache_tokens)}, which needs {quoted(needed)} bytes; use fewer"
        )
    raise BadBundle(
        f"bundle {bundle.name!r}: cannot run here: it needs {quoted(needed)} bytes for caches and logits, and "
        f"{str(device)!r} has {has} in total; build it with smaller limits"
    )


def _needed(bundle: Bundle, options: RuntimeOptions) -> int:
    limits = bundle.limits
    window = limits.num_draft_tokens if options.max_draft_tokens is None else options.max_draft_tokens
    bindings = [cache for _, cache in bundle.manifest.caches]
    bindings.append(bundle.manifest.engines["target"].contract["logits"])
    sizes = {"batch": limits.batch, "slots": limits.batch, "rows": window + 1}
    sizes["blocks"] = num_cache_blocks(limits, options.cache_tokens)
    dtypes: list[torch.dtype] = [getattr(torch, each.dtype) for each in bindings]
    each_size = [prod(each.resolve(sizes)) * dtype.itemsize for each, dtype in zip(bindings, dtypes, strict=True)]
    recurrent = [size for each, size in zip(bindings, each_size, strict=True) if each.name.startswith(STATES)]
    copies = num_snapshots(limits.batch, limits.cache) if options.prefix_caching else 0
    return sum(each_size) + copies * sum(recurrent) // limits.batch
