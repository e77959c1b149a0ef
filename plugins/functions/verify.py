"""``verify_draft`` in standard operators; ``reference/verify.py`` defines it and explains why it is exact."""

from collections.abc import Collection

import numpy as np
import onnx_ir as ir

from tandemrt.plugins.functions.body import Body, BodyValue
from tandemrt.plugins.functions.draft_window import DraftWindow
from tandemrt.plugins.functions.filters import filter_logits, filtered, finite_logits
from tandemrt.plugins.functions.noise import accept_coin, position_noise
from tandemrt.plugins.functions.rejection import reject
from tandemrt.plugins.operators.constants import Purpose, Rule


def verify_draft(draft_probs: bool) -> ir.Function:
    """(logits, draft_tokens, draft_len, temperature, …, rule[, draft_probs]) → tokens, count.

    A greedy batch needs neither sort nor noise, and a coupled batch no softmax; a rejection batch draws noise for one
    row per request. With draft probabilities the operator is ``verify_draft_probs``: a TensorRT plugin has a fixed
    number of inputs, and the parser finds it by its name.
    """
    body = Body.of("verify_draft_probs" if draft_probs else "verify_draft")
    seed, position, rule = body["seed"], body["position"], body["rule"]
    probs = body["draft_probs"] if draft_probs else None
    raw = finite_logits(body, body["logits"])
    window = DraftWindow(body, raw, body["draft_tokens"], body["draft_len"])
    greedy = raw.argmax_last()
    sampled = body["temperature"] > np.float32(0)
    rejecting = sampled & rule.equals(np.int64(Rule.REJECTION))

    def sample() -> list[BodyValue]:
        scores = filtered(body, raw)
        [choice] = body.branch((sampled & ~rejecting).any(), lambda: draw(scores), lambda: [greedy])
        return body.branch(
            rejecting.any(),
            lambda: reject(window, scores, choice, probs, rejecting, seed, position),
            lambda: window.compare(choice),
        )

    def draw(scores: BodyValue) -> list[BodyValue]:
        positions = position.expand_dims(-1) + body.arange(window.rows)
        purpose = np.array([[Purpose.SAMPLE]], np.int64)
        noise = body.call("position_noise", seed.expand_dims(-1), positions, purpose, window.vocab)
        return [body.where(sampled.expand_dims(-1), (scores + noise).argmax_last(), greedy)]

    accepted, final = body.branch(sampled.any(), sample, lambda: window.compare(greedy))
    tokens, count = window.written(accepted, final)
    return body.function(tokens=tokens, count=count)


def bodies(dtype: str, present: Collection[str]) -> tuple[ir.Function, ...]:  # noqa: ARG001
    """Return the functions; see Function in plugins/operators/launch.py."""
    return (verify_draft(False), position_noise(), accept_coin(), filter_logits())


def bodies_probs(dtype: str, present: Collection[str]) -> tuple[ir.Function, ...]:  # noqa: ARG001
    """Return the functions of the operator with draft probabilities; see ``bodies``."""
    return verify_draft(True), position_noise(), accept_coin(), filter_logits()
