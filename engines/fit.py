"""What a bundle's manifest alone says against a request: asked before any engine opens, and again at admission."""

from tandemrt.engines.drafts import DRAFTS
from tandemrt.engines.errors import BadRequest, quoted
from tandemrt.engines.manifest import Manifest
from tandemrt.engines.params import SamplingParams


def require_fit(params: SamplingParams, manifest: Manifest, window: int | None = None) -> None:
    """Raise BadRequest unless the bundle can serve ``params`` for a prompt of one token.

    ``window`` is the most drafted tokens of a round where the bundle is opened; None: the bundle's own.
    """
    limits = manifest.limits
    most = limits.window if window is None else window
    if params.max_tokens is not None and params.max_tokens >= limits.length:
        raise BadRequest(
            f"max_tokens: prompt and output must fit the engine's length {limits.length}, received "
            f"{quoted(params.max_tokens)}; ask for at most {limits.length - 1} or build the bundle with a larger "
            "limits.length"
        )
    if params.window is not None and params.window > most:
        raise BadRequest(
            f"window: this runtime drafts at most {most} tokens per round, received {quoted(params.window)}"
        )
    accepted = params.synthetic_acceptance_length
    drafted = most if params.window is None else params.window
    if accepted is not None and accepted > drafted + 1:
        raise BadRequest(
            f"synthetic_acceptance_length: with {drafted} drafted tokens a round has at most {drafted + 1}, received "
            f"{quoted(accepted)}; ask for fewer"
        )
    if not DRAFTS[manifest.draft.kind].draws:
        for name in ("draft_sampling", "draft_greedy_below", "draft_temperature_scale"):
            if getattr(params, name) is not None:
                raise BadRequest(
                    f"{name}: says how a draft model draws its tokens, and this bundle has none (draft "
                    f"{manifest.draft.kind!r}), received {quoted(getattr(params, name))}; leave it out"
                )
    beyond = [token for token in params.logit_bias or () if token >= manifest.valid_tokens]
    if beyond:
        raise BadRequest(
            f"logit_bias: token ids must be in 0..{manifest.valid_tokens - 1}, received {quoted(beyond[0])}"
        )
    if params.thinking_token_budget is not None and manifest.markers is None:
        raise BadRequest(
            "thinking_token_budget: this bundle names no reasoning markers, received "
            f"{quoted(params.thinking_token_budget)}; build it with [reasoning] in the recipe"
        )
