"""A bundle beside another of the same model: logits, perplexity and acceptance on a text of the user's.

For a bundle whose weights were rounded, beside one of the checkpoint that they were rounded from.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from tandemrt.engines.bundle import Bundle
from tandemrt.engines.errors import BadRequest, clipped
from tandemrt.engines.options import RuntimeOptions
from tandemrt.engines.params import SamplingParams
from tandemrt.runtime.check.finding import Finding
from tandemrt.runtime.check.walk import Decoder
from tandemrt.runtime.llm import LLM

LONGEST = 1024  # tokens of the text that are read
_PROMPTS, _PROMPT, _OUTPUT = 8, 32, 48  # texts that are continued, their tokens, and those of each answer, at most


@dataclass(frozen=True)
class Reading:
    """``logits`` float32 [tokens, vocab] of a text, and tokens per request and round when parts of it are continued."""

    logits: torch.Tensor
    acceptance: float | None


def check_beside(bundle: Bundle, other: Bundle, options: RuntimeOptions, text: str) -> Iterator[Finding]:
    """Open one after the other and compare what they make of ``text``.

    Raises BadRequest for a text that is too short, or that has other tokens in the other bundle.
    """
    longest = min(LONGEST, bundle.limits.length, other.limits.length)
    with LLM(bundle.folder, **options.given()) as llm:
        tokens = llm.tokenizer.encode(text)[:longest]
        if len(tokens) < 2 * _PROMPT:
            rule = f"--text: must have at least {2 * _PROMPT} tokens"
            raise BadRequest(f"{rule}; it has {len(tokens)}; give a longer text")
        found = read(llm, tokens)
    with LLM(other.folder, **options.given()) as llm:
        if other.vocab != bundle.vocab or llm.tokenizer.encode(text)[:longest] != tokens:
            raise BadRequest(f"--beside: must have the same tokens for the text; {other.name} has others")
        yield from compared(found, read(llm, tokens), tokens, other.name)


def read_text(path: Path) -> str:
    """The text of a file. Raises BadRequest."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise BadRequest(f"--text: must be a file with text in UTF-8; {clipped(path)}: {clipped(error)}") from error


def read(llm: LLM, tokens: Sequence[int]) -> Reading:
    """What a bundle makes of a text, a window at a time, as it is served."""
    target, step = llm.loop.tandem.engines["target"], llm.bundle.limits.window + 1
    with llm.loop.clock.active():
        decoder, score = Decoder(target, 1), torch.arange(step)[None]
        places = range(0, len(tokens) - step + 1, step)
        logits = torch.cat([decoder(0, torch.tensor([tokens[at : at + step]]), [at], score)[0] for at in places])
    if llm.bundle.draft.kind == "none":
        return Reading(logits, None)
    starts = range(0, len(tokens) - _PROMPT, max(_PROMPT, len(tokens) // _PROMPTS))
    prompts = [list(tokens[at : at + _PROMPT]) for at in starts]
    output = min(_OUTPUT, llm.bundle.limits.length - _PROMPT)
    before = llm.metrics.copy()
    llm.generate(prompts, SamplingParams(temperature=0, max_tokens=output, ignore_eos=True))
    metrics = llm.metrics.since(before)
    return Reading(logits, 1 + sum(metrics.accepted) / max(1, metrics.steps))


def compared(found: Reading, other: Reading, tokens: Sequence[int], name: str) -> Iterator[Finding]:
    """What ``found`` is beside ``other``, the reading of the bundle ``name``."""
    against, count = f"bundle {name}", min(len(found.logits), len(other.logits)) - 1
    mine, theirs = (each.logits[:count].log_softmax(-1) for each in (found, other))
    following = torch.tensor(tokens[1 : count + 1])[:, None]
    perplexity = [math.exp(-float(each.gather(1, following).mean())) for each in (mine, theirs)]
    yield Finding(
        "perplexity of the text",
        against,
        f"{perplexity[0]:.3f} against {perplexity[1]:.3f}, {perplexity[0] / perplexity[1] - 1:+.2%}",
        "measured",
        {"tokens": count, "perplexity": perplexity[0], "against": perplexity[1]},
    )
    gap, same = found.logits[:count] - other.logits[:count], int((mine.argmax(-1) == theirs.argmax(-1)).sum())
    relative = float(gap.norm() / other.logits[:count].norm())
    divergence = float((theirs.exp() * (theirs - mine)).sum(-1).mean())
    yield Finding(
        "logits of the text",
        against,
        f"{relative:.2%} apart (root mean square); divergence {divergence:.4f} nats; largest logit the same in "
        f"{same} of {count}",
        "measured",
        {"root_mean_square": relative, "divergence": divergence, "same_largest": same, "tokens": count},
    )
    lengths = [f"{each:.2f}" if each is not None else "none" for each in (found.acceptance, other.acceptance)]
    yield Finding(
        "tokens per request and round",
        against,
        f"{lengths[0]} against {lengths[1]}, greedy, parts of the text continued",
        "measured",
        {"acceptance_length": found.acceptance or 0.0, "against": other.acceptance or 0.0},
    )
