"""Build the engine loop of a bundle: open engines, allocate buffers and caches, make the drafter."""

from functools import partial

from tandemrt.engines.bundle.bundle import Bundle
from tandemrt.engines.bundle.implied import require_implied
from tandemrt.engines.contract.calls import largest_prompts, most_query, slack
from tandemrt.engines.contract.contract import Contract
from tandemrt.engines.contract.operators import EXPERTS
from tandemrt.engines.options.options import RuntimeOptions
from tandemrt.engines.recipe.backends import BACKENDS, CUDA
from tandemrt.engines.validation.errors import BackendUnavailable, BadRequest
from tandemrt.plugins.tensors import torch
from tandemrt.plugins.tensors.devices.lookup import device_of, gpus
from tandemrt.runtime.caches.call_layout import CallLayout, make_layout
from tandemrt.runtime.caches.kv_cache import KVCacheManager, make_cache, make_cache_manager
from tandemrt.runtime.device.backends.opening import engines_in_use, open_engines, require_known_backends
from tandemrt.runtime.device.buffers import RoundBuffers
from tandemrt.runtime.device.graphs import Graphs
from tandemrt.runtime.device.slot_state import SlotState
from tandemrt.runtime.device.streams import Streams
from tandemrt.runtime.device.timeline import Timeline
from tandemrt.runtime.engine_loop.draft_windows import DraftWindowPlanner
from tandemrt.runtime.engine_loop.image_inputs import ImageInputs
from tandemrt.runtime.engine_loop.loop import EngineLoop
from tandemrt.runtime.engine_loop.target import TargetRunner
from tandemrt.runtime.llm.draft_factory import make_drafter, make_lookup
from tandemrt.runtime.llm.draft_parts import DraftParts
from tandemrt.runtime.llm.host_costs import HostCosts
from tandemrt.runtime.llm.memory import require_memory
from tandemrt.runtime.metrics.metrics import Metrics
from tandemrt.runtime.requests.scheduler import Scheduler

# Tokens of a round with prompts while requests decode, by default: larger rounds would delay their tokens.
_CHUNK_WHILE_DECODING, _WITH_EXPERTS = 2048, 4096


def assemble(bundle: Bundle, options: RuntimeOptions) -> EngineLoop:
    """Open the engines of ``bundle`` and allocate all memory of the engine loop. ``options`` must fit its limits."""
    limits = bundle.limits
    _require_draft_model(bundle, options)
    device = _device(bundle, options.device)
    on_host = device_of(device).on_host
    host_costs = HostCosts.of(bundle) if on_host else None
    overlap = not on_host if options.overlap is None else options.overlap
    windows = DraftWindowPlanner(
        options.num_draft_tokens,
        limits.num_draft_tokens,
        fast_forward=not overlap if options.fast_forward_drafts is None else options.fast_forward_drafts,
        drafts=bundle.draft.kind != "none",
        mask_drafts=options.draft_masks,
        adaptive=_adapts(bundle, options, host_costs),
        any_shape=on_host and limits.cache == "linear",
        calibrates=not _has_experts(bundle),  # all tokens of rounds without texts choose the same experts
        # A CPU times no round to know them, because texts are often few and short. A GPU takes less for missed tokens
        # than for a call.
        missed_cost=host_costs.missed if host_costs else 0.0,
        token_cost=host_costs.token(limits.num_draft_tokens) if host_costs and limits.num_draft_tokens else None,
    )
    require_implied(bundle.manifest)
    require_memory(bundle, options, device)
    streams = Streams(device)
    with streams.active():
        engines = open_engines(bundle, device, options.threads, engines_in_use(bundle), cuda_graphs=options.cuda_graphs)
        contracts = [engine.contract for engine in engines.values()]
        slack_tokens = slack(bundle.draft.kind, windows.largest)
        cache_manager = make_cache_manager(
            limits,
            contracts,
            options.cache_tokens,
            device,
            slack=slack_tokens,
            # decoding rounds keys and values unlike prompts do, so a text would show what the cache held
            caches_outputs=not bundle.engine("target").batch_invariant,
        )
        packed_tokens = largest_prompts(limits.batch, limits.prefill_chunk).prompt_tokens
        buffers = RoundBuffers(
            slots=limits.batch,
            window=windows.largest,
            vocab=bundle.vocab,
            length=limits.length,
            chunk=limits.prefill_chunk,
            dtype=getattr(torch, engines["target"].contract["logits"].dtype),
            device=device,
            features=_features(engines["target"].contract),
            packed=packed_tokens,
        )
        state = SlotState(limits.batch, device)
        metrics = Metrics(accepted=[0] * windows.largest)
        graphs = Graphs(device, metrics, enabled=options.cuda_graphs)
        cache = make_cache(engines["target"], limits.batch, cache_manager)
        new_layout = partial(_layout, bundle, cache_manager, device)
        layout = new_layout()
        images = None
        if bundle.manifest.vision is not None:
            target = engines["target"].contract
            chunk = packed_tokens if layout.packed else 0
            images = ImageInputs(target, state, slots=limits.batch, window=windows.largest, chunk=chunk, device=device)
        parts = DraftParts(bundle, engines, buffers, state, cache_manager, cache, graphs, layout, new_layout)
        return EngineLoop(
            TargetRunner(engines, buffers, state, cache, graphs, layout, images),
            make_drafter(parts),
            make_lookup(parts, options.lookup, host_costs or windows.costs),
            Scheduler(limits.batch, options.queue_limit),
            streams,
            cache_manager,
            metrics,
            Timeline(device, metrics, enabled=options.profile),
            draft_windows=windows,
            slack=slack_tokens,
            slots=limits.batch,
            prefill_chunk=limits.prefill_chunk,
            prefill_chunk_while_decoding=options.prefill_chunk or _chunk_while_decoding(bundle),
            overlap=overlap,
        )


def _chunk_while_decoding(bundle: Bundle) -> int:
    most = _WITH_EXPERTS if bundle.manifest.specs["target"]["experts"] else _CHUNK_WHILE_DECODING
    return min(bundle.limits.prefill_chunk, most)


def _require_draft_model(bundle: Bundle, options: RuntimeOptions) -> None:
    """Raise BadRequest for options that a draft without a model does not have."""
    kind = bundle.draft.kind
    if bundle.draft.engines:
        return
    if options.draft_masks:
        raise BadRequest(
            f"draft_masks: needs a draft with a model of its own, received True for draft.kind {kind!r}, "
            "which has no model to mask; leave it out"
        )
    if options.lookup is not None and options.lookup is not (kind == "ngram"):
        remedy = "build with draft.kind 'ngram'" if options.lookup else "use num_draft_tokens=0"
        raise BadRequest(
            f"lookup: needs a draft with a model, received {options.lookup} for draft.kind {kind!r}; {remedy}"
        )


def _device(bundle: Bundle, device: str | None) -> torch.device:
    target = bundle.manifest.engines["target"]
    where = torch.device(bundle.device(device))
    on_host = device_of(where).on_host
    require_known_backends(bundle)
    runs_on_cpu = BACKENDS[target.backend].runs_on_cpu
    # No backend has CPU kernels for bfloat16.
    bfloat16 = any(engine.dtype == "bfloat16" for engine in bundle.manifest.engines.values())
    if not on_host and not gpus():
        if BACKENDS[target.backend].device == "cpu":
            advice = f"leave it out, or build the bundle again with backend.name {CUDA!r} for a machine with a GPU"
        else:
            advice = "install a torch built for CUDA on a machine with a GPU"
            advice += ", or use device='cpu'" if runs_on_cpu and not bfloat16 else ""
        raise BackendUnavailable(
            f"device: torch {torch.__version__} finds no CUDA GPU here, received {str(where)!r} for engines built for "
            f"{target.backend} ({target.built_for}); {advice}"
        )
    if on_host and runs_on_cpu and bfloat16:
        raise BackendUnavailable(
            f"device: must be 'cuda' for engines that compute in bfloat16, received {str(where)!r}; run them on a GPU, "
            "or build the bundle again with --dtype float16 or float32"
        )
    if not on_host and (where.index or 0) >= (count := len(gpus())):
        raise BackendUnavailable(
            f"device: torch finds {count} GPUs here, received {str(where)!r}; count from 0, or leave the number out"
        )
    return device_of(where).numbered()  # without an index, each thread would use its own current device


def _adapts(bundle: Bundle, options: RuntimeOptions, host_costs: HostCosts | None) -> bool:
    """Whether draft windows adapt.

    By default on a GPU, if texts do not depend on them to the last bit, and on a CPU where fixed ones may lose.
    """
    if options.adaptive_draft_tokens is not None:
        return options.adaptive_draft_tokens
    if options.num_draft_tokens is not None or not bundle.draft.engines:
        return False
    return bundle.engine("target").batch_invariant if host_costs is None else host_costs.fixed_may_lose


def _has_experts(bundle: Bundle) -> bool:
    decoder = bundle.engine("target").decoder
    return decoder is not None and any(step.name in EXPERTS for step in decoder.operators)


def _features(target: Contract) -> int:
    """Width of the target's output "features" (hidden states for a draft head); 0 without one."""
    return next((int(b.shape[-1]) for b in target.outputs if b.name == "features"), 0)


def _layout(bundle: Bundle, cache_manager: KVCacheManager, device: torch.device) -> CallLayout:
    limits = bundle.limits
    largest = largest_prompts(limits.batch, limits.prefill_chunk)
    windows = limits.batch * most_query(bundle.draft.kind, limits.num_draft_tokens)
    return make_layout(cache_manager, device, windows=windows, largest=largest)
