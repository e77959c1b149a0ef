"""Temperature and the filters in standard operators; they sort only if a sampled request needs it."""

import numpy as np
import onnx_ir as ir

from tandemrt.engines.contract.sampling_parameters import FILTERS, SIGMA_UNITS
from tandemrt.plugins.functions.body import FLOAT32, FLOAT64, INT64, Body, BodyValue

_NEG_INF = np.float32(-np.inf)
_PARAMETERS = ("temperature", *FILTERS)


def finite_logits(body: Body, logits: BodyValue) -> BodyValue:
    """Return float32 logits with −inf for values that are not finite."""
    values = logits.cast(FLOAT32)
    return body.where(body.op("Abs", values) < np.float32(np.inf), values, _NEG_INF)


def probabilities(scores: BodyValue) -> BodyValue:
    """Return the probabilities of scores, float32, computed in float64."""
    weights = scores.exp()
    return (weights / weights.sum_last()).cast(FLOAT32)


def filtered(body: Body, logits: BodyValue) -> BodyValue:
    """Call ``filter_logits`` on finite ``logits``, with the parameters among the inputs of ``body``."""
    return body.call("filter_logits", logits, *(body[name] for name in _PARAMETERS))


def filter_logits() -> ir.Function:
    """(finite logits float32 [batch, rows, vocab], temperature and each filter [batch]) → scores, same shape.

    It sorts as many scores as the widest top-k of the batch needs, and all of them only for top-p without top-k.
    """
    body = Body("filter_logits", ["logits", *_PARAMETERS])
    logits, temperature = body["logits"], body["temperature"]
    top_n_sigma, top_k, top_p, min_p = (body[name] for name in ("top_n_sigma", "top_k", "top_p", "min_p"))
    sampled = temperature > np.float32(0)
    vocab = logits.size(-1)
    peak = logits.max_last()
    peak = body.where(peak > _NEG_INF, peak, np.float32(0))
    divisor = _per_row(body.where(sampled, temperature, np.float32(1)))
    scores = (logits - peak) / divisor

    sigma_on = sampled & (top_n_sigma > np.float32(0))
    k_on = sampled & (top_k > np.int64(0)) & (top_k < vocab)
    p_on = sampled & (top_p > np.float32(0)) & (top_p < np.float32(1))
    min_on = sampled & (min_p > np.float32(0))

    def near_peak() -> list[BodyValue]:
        reach = _per_row(top_n_sigma).cast(FLOAT64) * _standard_deviation(body, logits, peak)
        keeps = ~_per_row(sigma_on) | (shifted.cast(FLOAT64) >= -reach / divisor.cast(FLOAT64))
        return [body.where(keeps, shifted, _NEG_INF)]

    shifted = scores
    [scores] = body.branch(sigma_on.any(), near_peak, lambda: [shifted])

    def sorted_filters() -> list[BodyValue]:
        limit = body.where(k_on, top_k, vocab)
        widest = body.op("ReduceMax", body.where(k_on | p_on, limit, np.int64(1)), keepdims=0).expand_dims(0)
        descending, _ = body.ops("TopK", scores, widest, outputs=2, axis=-1)
        place = _per_row(body.op("Min", limit, widest) - np.int64(1))
        rows = body.concat(body.op("Shape", scores, end=-1), np.array([1], np.int64), axis=0)
        last = descending.at_last(body.op("Expand", place, rows))
        threshold = body.where(_per_row(k_on), last, _NEG_INF)
        [threshold] = body.branch(p_on.any(), lambda: [nucleus(descending, threshold)], lambda: [threshold])
        return [body.where(scores >= threshold, scores, _NEG_INF)]

    def nucleus(descending: BodyValue, threshold: BodyValue) -> BodyValue:
        total = body.where(scores >= threshold, scores, _NEG_INF).exp().sum_last()
        weights = body.where(descending >= threshold, descending, _NEG_INF).exp()
        before = body.op("CumSum", weights, np.int64(-1), exclusive=1)
        inside = before < _per_row(top_p).cast(FLOAT64) * total
        smallest = body.where(inside, descending, np.float32(np.inf)).min_last()
        return body.where(_per_row(p_on), smallest, threshold)

    [scores] = body.branch((k_on | p_on).any(), sorted_filters, lambda: [scores])
    kept = scores

    def relative() -> list[BodyValue]:
        return [body.where(kept.exp() >= _per_row(min_p).cast(FLOAT64), kept, _NEG_INF)]

    [scores] = body.branch(min_on.any(), relative, lambda: [kept])
    return body.function(scores=scores)


def _standard_deviation(body: Body, logits: BodyValue, peak: BodyValue) -> BodyValue:
    """Return the standard deviation of finite logits, float64 [batch, rows, 1]; see ``standard_deviation``."""
    finite = logits > _NEG_INF
    values = body.where(finite, logits, peak)
    extent = peak.cast(FLOAT64) - values.min_last().cast(FLOAT64)
    scale = body.op("Reciprocal", body.where(extent > np.float64(0), extent, np.float64(1)))
    distance = (peak.cast(FLOAT64) - values.cast(FLOAT64)) * scale
    count = body.op("Max", finite.cast(FLOAT64).sum_last(), np.float64(1))

    def mean_of(terms: BodyValue) -> BodyValue:
        whole = body.op("Round", terms * np.float64(SIGMA_UNITS)).cast(INT64)
        return whole.sum_last().cast(FLOAT64) / count / np.float64(SIGMA_UNITS)

    mean = mean_of(distance)
    variance = body.op("Max", mean_of(distance * distance) - mean * mean, np.float64(0))
    return extent * body.op("Sqrt", variance)


def _per_row(values: BodyValue) -> BodyValue:
    return values.expand_dims(1, 2)
