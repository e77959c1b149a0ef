"""From a bundle to a loop: engines opened, buffers and caches allocated, a drafter chosen."""

from dataclasses import replace

from tandemrt.engines.bundle import Bundle
from tandemrt.engines.calls import largest_prompts, most_query, slack
from tandemrt.engines.contract import Contract
from tandemrt.engines.drafts import DRAFT_LAYERS, DRAFTS
from tandemrt.engines.errors import BackendUnavailable, BadRequest
from tandemrt.engines.implied import require_implied
from tandemrt.engines.options import RuntimeOptions
from tandemrt.plugins.tensors import torch
from tandemrt.runtime.backends import open_engines
from tandemrt.runtime.backends.base import Engine
from tandemrt.runtime.caches.kv_cache import BlockTable, Room, make_cache, make_room
from tandemrt.runtime.device import Clock
from tandemrt.runtime.drafters.base import Drafter
from tandemrt.runtime.drafters.block import DFlashDrafter
from tandemrt.runtime.drafters.head import HeadDrafter
from tandemrt.runtime.drafters.layers import LayersDrafter
from tandemrt.runtime.drafters.markov import MarkovDrafter
from tandemrt.runtime.drafters.model import ModelDrafter
from tandemrt.runtime.drafters.ngram import NgramDrafter
from tandemrt.runtime.drafters.none import NoDrafter
from tandemrt.runtime.drafters.parallel import ParallelDrafter
from tandemrt.runtime.drafters.parallel_head import ParallelHeadDrafter
from tandemrt.runtime.drafters.resources import DraftResources
from tandemrt.runtime.drafters.target_ids import read_target_ids
from tandemrt.runtime.memory import require_memory
from tandemrt.runtime.metrics import Metrics
from tandemrt.runtime.requests.scheduler import Scheduler
from tandemrt.runtime.round.buffers import RoundBuffers
from tandemrt.runtime.round.graphs import Graphs
from tandemrt.runtime.round.loop import Loop
from tandemrt.runtime.round.runs import PromptRuns
from tandemrt.runtime.round.state import SlotState
from tandemrt.runtime.round.tandem import Tandem
from tandemrt.runtime.round.timeline import Timeline
from tandemrt.runtime.round.windows import Windows


def assemble(bundle: Bundle, options: RuntimeOptions) -> Loop:
    """Open ``bundle`` and allocate all that its rounds need. The options must fit its limits."""
    limits = bundle.limits
    if options.draft_masks and not DRAFTS[bundle.draft.kind].engines:
        raise BadRequest(
            f"draft_masks: needs a draft with a model of its own, received True for draft.kind {bundle.draft.kind!r}, "
            "which draws nothing; leave it out"
        )
    where = _device(bundle, options.device)
    overlap = where.type == "cuda" if options.overlap is None else options.overlap
    windows = Windows(
        options.window,
        limits.window,
        forced=not overlap if options.forced_drafts is None else options.forced_drafts,
        drafts=bundle.draft.kind != "none",
        masked=options.draft_masks,
        adaptive=options.adaptive_window,
    )
    require_implied(bundle.manifest)
    require_memory(bundle, options, where)
    clock = Clock(where)
    with clock.active():
        engines = open_engines(bundle, where, options.threads)
        contracts = [engine.contract for engine in engines.values()]
        written = slack(bundle.draft.kind, windows.largest)
        room = make_room(limits, contracts, options.cache_tokens, where, window=written)
        buffers = RoundBuffers(
            slots=limits.batch,
            window=windows.largest,
            vocab=bundle.vocab,
            length=limits.length,
            chunk=limits.prefill_chunk,
            dtype=getattr(torch, engines["target"].contract["logits"].dtype),
            device=where,
            features=_features(engines["target"].contract),
            packed=largest_prompts(limits.batch, limits.prefill_chunk).prompt_tokens,
        )
        state = SlotState(limits.batch, where)
        metrics = Metrics(accepted=[0] * windows.largest)
        graphs = Graphs(where, metrics, enabled=options.cuda_graphs)
        kv = make_cache(engines["target"].contract, limits.batch, room, where)
        runs = _runs(bundle, room)
        return Loop(
            Tandem(engines, buffers, state, kv, graphs, runs),
            _drafter(bundle, engines, buffers, state, room, graphs, runs),
            Scheduler(limits.batch, options.queue_limit),
            clock,
            room,
            metrics,
            Timeline(where, metrics, enabled=options.profile),
            windows=windows,
            slack=written,
            slots=limits.batch,
            prefill_chunk=limits.prefill_chunk,
            prefill_chunk_beside=limits.prefill_chunk if options.prefill_chunk is None else options.prefill_chunk,
            overlap=overlap,
        )


def _device(bundle: Bundle, device: str | None) -> torch.device:
    target = bundle.manifest.engines["target"]
    built_for = "cpu" if target.backend == "onnxruntime-cpu" else "cuda"
    where = torch.device(built_for if device is None else device)
    onnxruntime = target.backend.startswith("onnxruntime")  # whose kernels for a CPU have no bfloat16
    bfloat16 = any(engine.dtype == "bfloat16" for engine in bundle.manifest.engines.values())
    if where.type == "cuda" and not torch.cuda.is_available():
        raise BackendUnavailable(
            f"device: torch {torch.__version__} finds no CUDA GPU here, received {str(where)!r} for engines built for "
            f"{target.backend} ({target.built_for}); install a torch built for CUDA on a machine with a GPU"
            + (", or use device='cpu'" if onnxruntime and not bfloat16 else "")
        )
    if where.type == "cpu" and onnxruntime and bfloat16:
        raise BackendUnavailable(
            f"device: must be 'cuda' for engines that compute in bfloat16, received {str(where)!r}; run them on a GPU, "
            "or build the bundle again with --dtype float16 or float32"
        )
    if where.type == "cuda" and (where.index or 0) >= (count := torch.cuda.device_count()):
        raise BackendUnavailable(
            f"device: torch finds {count} GPUs here, received {str(where)!r}; count from 0, or leave the number out"
        )
    if str(where) == "cuda":  # without a number, every thread would have a current device of its own
        where = torch.device("cuda", torch.cuda.current_device())
    return where


def _drafter(
    bundle: Bundle,
    engines: dict[str, Engine],
    buffers: RoundBuffers,
    state: SlotState,
    room: Room,
    graphs: Graphs,
    runs: PromptRuns | None,
) -> Drafter:
    draft, limits, window = bundle.draft, bundle.limits, buffers.window
    if window == 0 or draft.kind == "none":
        return NoDrafter()
    if draft.kind == "ngram":
        assert draft.ngram_min is not None
        assert draft.ngram_max is not None
        return NgramDrafter(buffers, window=window, shortest=draft.ngram_min, longest=draft.ngram_max)
    kv = make_cache(engines["draft"].contract, limits.batch, room, engines["draft"].device)
    ids = read_target_ids(bundle)
    resources = DraftResources(
        engines, buffers, state, kv, graphs, runs, slots=limits.batch, window=window, target_ids=ids
    )
    mask, chunk = draft.mask_token, limits.prefill_chunk
    if draft.block is not None:
        assert mask is not None
        block = MarkovDrafter if draft.kind == "dspark" else DFlashDrafter
        return block(resources, mask_token=mask, block=draft.block, sample_from_anchor=draft.sample_from_anchor)
    if draft.kind in ("eagle3", "mtp", "peagle"):
        resources = replace(resources, runs=_runs(bundle, room))  # of pairs, a token further than the target's
        query = most_query(draft.kind, window)
        if mask is not None:
            return ParallelHeadDrafter(resources, mask_token=mask, query=query, chunk=chunk)
        if draft.layers is not None:
            layers = [engines[name] for name in DRAFT_LAYERS[: draft.layers]]
            further = [make_cache(each.contract, limits.batch, room, each.device) for each in layers[1:]]
            all_runs = [each for each in (resources.runs, *(_runs(bundle, room) for _ in further)) if each is not None]
            return LayersDrafter(resources, caches=[kv, *further], runs=all_runs, query=query, chunk=chunk)
        return HeadDrafter(resources, query=query, chunk=chunk)
    reach = bundle.manifest.specs["draft"]["max_length"]
    if draft.kind == "pard":
        assert mask is not None
        return ParallelDrafter(resources, mask_token=mask, reach=reach)
    return ModelDrafter(resources, missed=_runs(bundle, room), chunk=chunk, reach=reach)


def _features(target: Contract) -> int:
    """How wide what the target gives for a draft head is; 0 if it gives nothing."""
    return next((int(b.shape[-1]) for b in target.outputs if b.name == "features"), 0)


def _runs(bundle: Bundle, room: Room) -> PromptRuns | None:
    """Memory for the prompts of packed calls, which engines over paged caches take."""
    if not isinstance(room, BlockTable):
        return None
    limits = bundle.limits
    largest = largest_prompts(limits.batch, limits.prefill_chunk)
    windows = limits.batch * most_query(bundle.draft.kind, limits.window)
    return PromptRuns(windows=windows, largest=largest, table=room.device)
