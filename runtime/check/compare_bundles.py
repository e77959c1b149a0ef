"""Compare two bundles of one model on a text: logits, perplexity and acceptance.

Typically a quantized bundle and one of the unquantized checkpoint.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from tandemrt.engines.bundle.bundle import Bundle
from tandemrt.engines.options.options import RuntimeOptions
from tandemrt.engines.parameters.sampling import SamplingParams
from tandemrt.engines.text.tokenizer import load_tokenizer
from tandemrt.engines.validation.errors import BadRequest, clipped
from tandemrt.runtime.check.decoder_run import DecoderRunner
from tandemrt.runtime.check.result import CheckResult
from tandemrt.runtime.llm.llm import LLM

MAX_TOKENS = 1024  # of the text
_PROMPTS, _PROMPT, _OUTPUT = 8, 32, 48  # parts of the text to continue, tokens of each, tokens of each output


@dataclass(frozen=True)
class TextScores:
    """Scores of a text.

    Attributes:
        logits: float32[tokens, vocab].
        acceptance: tokens per request and round while parts of the text are continued; None without a draft.
    """

    logits: torch.Tensor
    acceptance: float | None


def compare_bundles(
    bundle: Bundle, other: Bundle, options: RuntimeOptions, tokens: Sequence[int]
) -> Iterator[CheckResult]:
    """Open one bundle after the other, score the text ``tokens`` with each and compare the scores."""
    with LLM(bundle.folder, **options.arguments()) as llm:
        scores = score_text(llm, tokens)
    with LLM(other.folder, **options.arguments()) as llm:
        yield from compare_scores(scores, score_text(llm, tokens), tokens, other.name)


def shared_tokens(bundle: Bundle, other: Bundle, options: RuntimeOptions, text: str) -> list[int]:
    """Return the tokens of ``text`` that both bundles score. Opens no engine.

    Raises BadRequest if ``options`` do not fit ``other``, if the text is too short, or if the bundles have different
    tokens for it. Raises BadBundle for a tokenizer that cannot be opened.
    """
    try:
        options.require_fit(other.limits)
    except BadRequest as error:
        raise BadRequest(f"--compare-with: {other.name} must fit the options: {error}") from error
    longest = min(MAX_TOKENS, bundle.limits.length, other.limits.length)
    tokens, others = (
        load_tokenizer(each.tokenizer_dir, delimiters=each.manifest.delimiter_texts).encode(text)
        for each in (bundle, other)
    )
    if other.vocab != bundle.vocab or others[:longest] != tokens[:longest]:
        raise BadRequest(f"--compare-with: must have the same tokens for the text; {other.name} has others")
    if len(tokens) < 2 * _PROMPT:
        rule = f"--text: must have at least {2 * _PROMPT} tokens"
        raise BadRequest(f"{rule}; it has {len(tokens)}; give a longer text")
    return tokens[:longest]


def read_text(path: Path) -> str:
    """Return the text in the file ``path``. Raises BadRequest."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise BadRequest(f"--text: must be a file with text in UTF-8; {clipped(path)}: {clipped(error)}") from error


def score_text(llm: LLM, tokens: Sequence[int]) -> TextScores:
    """Score ``tokens`` in calls of the size of a draft window, as in serving."""
    target, step = llm.loop.target.engines["target"], llm.bundle.limits.num_draft_tokens + 1
    with llm.loop.streams.active():
        runner, score = DecoderRunner(target, 1), torch.arange(step)[None]
        starts = range(0, len(tokens) - step + 1, step)
        logits = torch.cat([runner.run(0, torch.tensor([tokens[at : at + step]]), [at], score)[0] for at in starts])
    if llm.bundle.draft.kind == "none":
        return TextScores(logits, None)
    starts = range(0, len(tokens) - _PROMPT, max(_PROMPT, len(tokens) // _PROMPTS))
    prompts = [list(tokens[at : at + _PROMPT]) for at in starts]
    output = min(_OUTPUT, llm.bundle.limits.length - _PROMPT)
    before = llm.metrics.copy()
    llm.generate(prompts, SamplingParams(temperature=0, max_tokens=output, ignore_eos=True))
    return TextScores(logits, llm.metrics.since(before).acceptance_length)


def compare_scores(scores: TextScores, other: TextScores, tokens: Sequence[int], name: str) -> Iterator[CheckResult]:
    """Compare ``scores`` with ``other``, the scores of the bundle ``name``."""
    against, count = f"bundle {name}", min(len(scores.logits), len(other.logits)) - 1
    mine, theirs = (each.logits[:count].log_softmax(-1) for each in (scores, other))
    following = torch.tensor(tokens[1 : count + 1])[:, None]
    perplexity = [math.exp(-float(each.gather(1, following).mean())) for each in (mine, theirs)]
    yield CheckResult(
        "perplexity of the text",
        against,
        f"{perplexity[0]:.3f} against {perplexity[1]:.3f}, {perplexity[0] / perplexity[1] - 1:+.2%}",
        "measured",
        {"tokens": count, "perplexity": perplexity[0], "against": perplexity[1]},
    )
    gap, same = scores.logits[:count] - other.logits[:count], int((mine.argmax(-1) == theirs.argmax(-1)).sum())
    relative = float(gap.norm() / other.logits[:count].norm())
    divergence = float((theirs.exp() * (theirs - mine)).sum(-1).mean())
    yield CheckResult(
        "logits of the text",
        against,
        f"{relative:.2%} apart (root mean square); divergence {divergence:.4f} nats; largest logit the same in "
        f"{same} of {count}",
        "measured",
        {"root_mean_square": relative, "divergence": divergence, "same_largest": same, "tokens": count},
    )
    lengths = [f"{each:.2f}" if each is not None else "none" for each in (scores.acceptance, other.acceptance)]
    yield CheckResult(
        "tokens per request and round",
        against,
        f"{lengths[0]} against {lengths[1]}, greedy, parts of the text continued",
        "measured",
        {"acceptance_length": scores.acceptance or 0.0, "against": other.acceptance or 0.0},
    )
