"""Checks of sampling parameters against a manifest, before an engine opens and again at admission."""

from tandemrt.engines.bundle.manifest import Manifest
from tandemrt.engines.parameters.sampling import SamplingParams
from tandemrt.engines.validation.errors import BadRequest, quoted


def require_fit(params: SamplingParams, manifest: Manifest, window: int | None = None) -> None:
    """Raise BadRequest unless the bundle can serve ``params`` for a prompt of one token.

    ``window``: the runtime's largest draft length; None: the bundle's.
    """
    limits = manifest.limits
    most = limits.num_draft_tokens if window is None else window
    if params.max_tokens is not None and params.max_tokens >= limits.length:
        raise BadRequest(
            f"max_tokens: prompt and output must fit the engine's length {limits.length}, received "
            f"{quoted(params.max_tokens)}; ask for at most {limits.length - 1} or build the bundle with a larger "
            "limits.length"
        )
    if params.num_draft_tokens is not None and params.num_draft_tokens > most:
        raise BadRequest(
            f"num_draft_tokens: this runtime drafts at most {most} tokens per round, received "
            f"{quoted(params.num_draft_tokens)}; ask for at most {most}"
        )
    accepted = params.synthetic_acceptance_length
    drafted = most if params.num_draft_tokens is None else params.num_draft_tokens
    if accepted is not None and accepted > drafted + 1:
        raise BadRequest(
            f"synthetic_acceptance_length: with {drafted} drafted tokens a round emits at most {drafted + 1} tokens, "
            f"received {quoted(accepted)}; ask for fewer"
        )
    if not manifest.draft.traits.samples:
        for name in ("draft_sampling", "draft_greedy_below", "draft_temperature_scale"):
            if getattr(params, name) is not None:
                raise BadRequest(
                    f"{name}: needs a draft model that samples; this bundle has none (draft.kind "
                    f"{manifest.draft.kind!r}), received {quoted(getattr(params, name))}; leave it out"
                )
    beyond = [token for token in params.logit_bias or () if token >= manifest.valid_tokens]
    if beyond:
        raise BadRequest(
            f"logit_bias: token ids must be in 0..{manifest.valid_tokens - 1}, received {quoted(beyond[0])}; drop it"
        )
    if params.thinking_token_budget is not None and manifest.reasoning is None:
        raise BadRequest(
            "thinking_token_budget: this bundle has no reasoning delimiters, received "
            f"{quoted(params.thinking_token_budget)}; build it with [reasoning] in the recipe"
        )
