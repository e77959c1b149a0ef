"""From a bundle to a loop: engines opened, buffers allocated, a drafter chosen."""

import torch

from tandemrt.engines.bundle import Bundle
from tandemrt.engines.errors import BackendUnavailable, BadRequest
from tandemrt.runtime.backends import open_engines
from tandemrt.runtime.backends.base import Engine
from tandemrt.runtime.buffers import RoundBuffers
from tandemrt.runtime.device import Clock
from tandemrt.runtime.drafters.base import Drafter
from tandemrt.runtime.drafters.model import ModelDrafter
from tandemrt.runtime.drafters.ngram import NgramDrafter
from tandemrt.runtime.drafters.none import NoDrafter
from tandemrt.runtime.loop import Loop
from tandemrt.runtime.scheduler import Scheduler
from tandemrt.runtime.slots import SlotState
from tandemrt.runtime.tandem import Tandem


def assemble(
    bundle: Bundle,
    *,
    device: str | torch.device | None,
    window: int | None,
    overlap: bool | None,
    threads: int | None,
    queue_limit: int,
) -> Loop:
    """Open ``bundle`` on ``device`` and allocate all that its rounds need. Arguments as for LLM."""
    limits = bundle.limits
    if window is not None and not 0 <= window <= limits.window:
        raise BadRequest(
            f"window: the bundle was built for 0..{limits.window} drafted tokens per round, received {window}"
        )
    if queue_limit < 1:
        raise BadRequest(f"queue_limit: at least one request must be able to wait, received {queue_limit}")
    where = torch.device(device) if device is not None else _built_for(bundle)
    if where.type == "cuda" and not torch.cuda.is_available():
        raise BackendUnavailable(
            f"device: torch {torch.__version__} finds no CUDA GPU here, received {str(where)!r}; "
            "use device='cpu', or install a torch built for CUDA on a machine with a GPU"
        )
    if str(where) == "cuda":  # without a number, every thread would have a current device of its own
        where = torch.device("cuda", torch.cuda.current_device())
    clock = Clock(where)
    with clock.active():
        return _loop(bundle, clock, window=window, overlap=overlap, threads=threads, queue_limit=queue_limit)


def _loop(
    bundle: Bundle, clock: Clock, *, window: int | None, overlap: bool | None, threads: int | None, queue_limit: int
) -> Loop:
    limits, where = bundle.limits, clock.device
    engines = open_engines(bundle, where, threads)
    buffers = RoundBuffers(
        slots=limits.batch,
        window=limits.window if window is None else window,
        vocab=bundle.vocab,
        length=limits.length,
        dtype=getattr(torch, engines["target"].contract["logits"].dtype),
        device=where,
    )
    state = SlotState(limits.batch, where)
    return Loop(
        Tandem(engines, buffers, state, limits.batch),
        _drafter(bundle, engines, buffers, state),
        Scheduler(limits.batch, queue_limit),
        clock,
        prefill_chunk=limits.prefill_chunk,
        overlap=where.type == "cuda" if overlap is None else overlap,
    )


def _drafter(bundle: Bundle, engines: dict[str, Engine], buffers: RoundBuffers, state: SlotState) -> Drafter:
    draft, window = bundle.draft, buffers.window
    if window == 0 or draft.kind == "none":
        return NoDrafter()
    if draft.kind == "ngram":
        assert draft.ngram_min is not None
        assert draft.ngram_max is not None
        return NgramDrafter(buffers, window=window, shortest=draft.ngram_min, longest=draft.ngram_max)
    return ModelDrafter(engines, buffers, state, slots=bundle.limits.batch, window=window)


def _built_for(bundle: Bundle) -> torch.device:
    return torch.device("cuda" if bundle.manifest.engines["target"].backend == "onnxruntime-cuda" else "cpu")
