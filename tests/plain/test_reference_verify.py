"""Cases of verify_draft and sample_draft. test_distributions.py tests the distributions."""

import numpy as np
import pytest

from tandemrt.engines.contract.sampling_parameters import FILTERS
from tandemrt.plugins.operators.constants import Purpose, Rule
from tandemrt.plugins.reference import accept_coin, position_noise, sample_draft, token_bitmask, verify_draft
from tests.plain.test_reference_noise import LARGEST_COIN_SEED, SMALLEST_COIN_SEED

PLAIN = {"temperature": 1.0, "seed": 1, "position": 7, "rule": "coupled"}
RULES = ["coupled", "rejection"]
NONE = np.zeros((1, 0), np.int64)


def verify(logits, draft, length=None, **changes):
    draft = np.atleast_2d(np.asarray(draft, np.int64))
    length = np.full(len(draft), draft.shape[1]) if length is None else np.asarray(length)
    return verify_draft(np.asarray(logits, np.float32), draft, length, **(PLAIN | changes))


def peaked(tokens, vocab=8):
    """Return rows of logits with their maximum at ``tokens``."""
    return np.eye(vocab, dtype=np.float32)[np.asarray(tokens)]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    ("choices", "draft", "length", "emitted"),
    [
        ([1, 2, 3, 4], [1, 2, 3], 3, [1, 2, 3, 4]),
        ([1, 2, 3, 4], [5, 2, 3], 3, [1]),
        ([1, 2, 3, 4], [1, 5, 3], 3, [1, 2]),
        ([1, 2, 3, 4], [1, 2, 5], 3, [1, 2, 3]),
        ([1, 2, 3, 4], [1, 2, 3], 2, [1, 2, 3]),
        ([1, 2, 3, 4], [1, 2, 3], 0, [1]),
        ([6], [], 0, [6]),
    ],
)
def test_a_greedy_request_accepts_while_the_draft_is_the_largest_logit(rule, choices, draft, length, emitted):
    """For every rule: all drafts accepted, the first, middle or last rejected, a short draft, no draft."""
    tokens, count = verify(
        peaked(choices)[None], np.array(draft, np.int64)[None], [length], temperature=0, rule=rule, top_k=1
    )
    assert tokens[0].tolist() == emitted + [-1] * (len(choices) - len(emitted))
    assert count.tolist() == [len(emitted)]


def test_greedy_takes_the_first_of_equal_logits():
    assert verify([[[0, 3, 1, 3]]], NONE, temperature=0)[0].tolist() == [[1]]


@pytest.mark.parametrize("q", [[0, 0, 1, 0], [0.5, 0.5, 0, 0]], ids=["drawn", "not even drawn"])
def test_a_token_of_no_mass_is_rejected_even_by_the_smallest_coin(q):
    """With a coin of 0, or with ``<=`` where q is 0 too, the masked token 2 would pass."""
    logits, draft_probs = [[[0, 1, -np.inf, 0], [0, 0, 0, 0]]], np.array([[q]], np.float32)
    tokens, count = verify(logits, [2], rule="rejection", seed=SMALLEST_COIN_SEED, position=0, draft_probs=draft_probs)
    assert count == 1
    assert tokens[0, 0] != 2


def test_a_certain_token_is_accepted_even_by_the_largest_coin():
    """u is below 1, so p = q = 1 always accepts."""
    logits = [[[-np.inf, -np.inf, 2, -np.inf], [0, 0, 0, 0]]]
    assert verify(logits, [2], rule="rejection", seed=LARGEST_COIN_SEED, position=0)[1] == 2


def test_a_draft_from_the_same_distribution_is_always_accepted():
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(2000, 2, 50)).astype(np.float32)
    request = PLAIN | {"rule": "rejection", "seed": np.arange(2000), "temperature": 0.7, "top_p": 0.9}
    draft, q = sample_draft(logits[:, 0], **request)
    assert (
        verify_draft(logits, draft[:, None], np.ones(2000), **request, draft_probs=q[:, None])[1].tolist() == [2] * 2000
    )


def test_an_empty_residual_falls_back_to_the_target():
    """q above p everywhere leaves an empty residual. The token still has the target's distribution."""
    target = np.array([0.4, 0.0, 0.35, 0.25])
    with np.errstate(divide="ignore"):
        logits = np.broadcast_to(np.log(target), (20000, 2, 4))
    q = np.broadcast_to(np.float32(3 * target), (20000, 1, 4))
    tokens, count = verify(logits, np.zeros((20000, 1)), rule="rejection", seed=np.arange(20000), draft_probs=q)
    rejected = tokens[count == 1, 0]
    assert rejected.size > 10000
    np.testing.assert_allclose(np.bincount(rejected, minlength=4) / rejected.size, target, atol=0.02)
    assert not (rejected == 1).any()


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_without_a_finite_logit_is_never_sampled(rule, temperature):
    """An empty mask row ends the run before it, even at the first row with no token emitted."""
    rows = 50 * peaked([0, 0, 0])
    for dead, emitted in ((0, []), (1, [0]), (2, [0, 0])):
        for filler in (-np.inf, np.nan, np.inf):
            logits = rows.copy()
            logits[dead] = filler
            tokens, count = verify(logits[None], [0, 0], temperature=temperature, rule=rule)
            assert tokens[0].tolist() == emitted + [-1] * (3 - len(emitted))
            assert count == len(emitted)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_token_whose_logit_is_not_finite_cannot_be_drawn(rule, temperature):
    logits = np.zeros((500, 2, 6), np.float32)
    logits[:, :, [0, 2, 4]] = [np.nan, np.inf, -np.inf]
    drafts = np.resize([0, 2, 4], (500, 1))
    tokens, count = verify(logits, drafts, temperature=temperature, rule=rule, seed=np.arange(500))
    assert (count == 1).all()
    assert set(tokens[:, 0]) <= {1, 3, 5}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("drafted", [-1, -8, 8, 2**40])
def test_a_drafted_id_outside_the_vocabulary_is_never_accepted(rule, drafted):
    tokens, count = verify(np.zeros((1, 2, 8)), [drafted], rule=rule)
    assert count == 1
    assert 0 <= tokens[0, 0] < 8


@pytest.mark.parametrize("rule", RULES)
def test_rows_after_the_draft_are_not_read(rule):
    logits = np.random.default_rng(1).normal(size=(3, 5, 9)).astype(np.float32)
    draft = np.random.default_rng(2).integers(0, 9, (3, 4))
    spoiled, spoiled_draft = logits.copy(), draft.copy()
    for request, length in enumerate((0, 2, 4)):
        spoiled[request, length + 1 :] = np.nan
        spoiled_draft[request, length:] = 99
    expected = verify(logits, draft, [0, 2, 4], rule=rule)
    for mine, theirs in zip(verify(spoiled, spoiled_draft, [0, 2, 4], rule=rule), expected, strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_without_a_draft_every_rule_gives_the_same_token():
    """The SAMPLE stream gives the bonus token, so it equals the token of autoregressive decoding."""
    logits = np.random.default_rng(3).normal(size=(50, 1, 30)).astype(np.float32)
    nothing = np.zeros((50, 0), np.int64)
    coupled, rejection = (verify(logits, nothing, seed=np.arange(50), rule=rule)[0] for rule in RULES)
    np.testing.assert_array_equal(coupled, rejection)
    noise = position_noise(np.arange(50), 7, Purpose.SAMPLE, 30)
    np.testing.assert_array_equal(coupled[:, 0], np.argmax(logits[:, 0] + noise, axis=-1))


def test_a_rejection_uses_the_coin_of_its_own_position():
    seeds, half = np.arange(400), np.log([[[0.5, 0.5], [0.5, 0.5]]])
    _, count = verify(np.repeat(half, 400, axis=0), np.zeros((400, 1)), seed=seeds, rule="rejection", position=3)
    np.testing.assert_array_equal(count == 2, accept_coin(seeds, 3) < 0.5)


def test_every_draft_of_a_window_uses_the_coin_of_its_own_position():
    seeds, halves = np.arange(400), np.log(np.full((400, 4, 2), 0.5))
    _, count = verify(halves, np.zeros((400, 3)), seed=seeds, rule="rejection", position=3)
    stands = np.stack([accept_coin(seeds, position) < 0.5 for position in (3, 4, 5)], axis=1)
    np.testing.assert_array_equal(count, 1 + np.cumprod(stands, axis=1).sum(axis=1))
    assert set(count) == {1, 2, 3, 4}


@pytest.mark.parametrize("length", [0, 1, 2, 3])
def test_a_fully_accepted_run_ends_with_a_draw_from_the_target(length):
    seeds, target = np.arange(300), np.log([0.1, 0.2, 0.3, 0.4])
    logits = np.broadcast_to(target, (300, 4, 4)).copy()
    logits[:, :length, 1:] = -np.inf  # every drafted token has probability 1
    tokens, count = verify(logits, np.zeros((300, 3)), np.full(300, length), seed=seeds, rule="rejection", position=3)
    assert set(count) == {length + 1}
    noise = position_noise(seeds, 3 + length, Purpose.SAMPLE, 4)
    np.testing.assert_array_equal(tokens[:, length], np.argmax(target + noise, axis=-1))


def test_a_rejected_draft_is_replaced_with_the_noise_of_the_residual():
    seeds, target = np.arange(500), np.array([0.1, 0.2, 0.3, 0.4])
    logits = np.broadcast_to(np.log(target), (500, 2, 4))
    tokens, count = verify(logits, np.zeros((500, 1)), seed=seeds, rule="rejection", position=3)
    with np.errstate(divide="ignore"):
        residual = np.log(target * [0, 1, 1, 1])
    expected = np.argmax(residual + position_noise(seeds, 3, Purpose.RESIDUAL, 4), axis=-1)
    np.testing.assert_array_equal(tokens[count == 1, 0], expected[count == 1])


def test_a_row_of_zero_probabilities_means_a_chosen_token():
    rng = np.random.default_rng(4)
    logits, draft = rng.normal(size=(300, 3, 5)).astype(np.float32), rng.integers(0, 5, (300, 2))
    request = {"rule": "rejection", "seed": np.arange(300)}
    expected = verify(logits, draft, **request)
    verified = verify(logits, draft, **request, draft_probs=np.zeros((300, 2, 5), np.float32))
    for mine, theirs in zip(verified, expected, strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_a_batch_equals_its_requests_one_by_one_in_any_order():
    """Rules, filters and temperatures are mixed. Slots and other requests of the batch have no effect."""
    rng = np.random.default_rng(5)
    batch, window, vocab = 40, 3, 12
    logits = 2 * rng.normal(size=(batch, window + 1, vocab)).astype(np.float32)
    draft, probs = rng.integers(0, vocab, (batch, window)), rng.dirichlet(np.ones(vocab), (batch, window))
    request = {
        "temperature": rng.choice([0, 0.5, 1.5], batch),
        **{name: rng.choice(each.cases, batch) for name, each in FILTERS.items()},
        "seed": rng.integers(-(2**63), 2**63, batch),
        "position": rng.integers(0, 2**34, batch),
        "rule": rng.integers(0, 2, batch),
    }
    length = rng.integers(0, window + 1, batch)

    def run(rows):
        chosen = {name: values[rows] for name, values in request.items()}
        return verify_draft(logits[rows], draft[rows], length[rows], **chosen, draft_probs=probs[rows])

    tokens, count = run(np.arange(batch))
    shuffled = rng.permutation(batch)
    np.testing.assert_array_equal(run(shuffled)[0], tokens[shuffled])
    for i in range(batch):
        alone, number = run(np.array([i]))
        assert (alone[0].tolist(), number[0]) == (tokens[i].tolist(), count[i])


def test_the_coupled_draft_uses_the_noise_of_the_target():
    logits = np.random.default_rng(6).normal(size=(50, 2, 40)).astype(np.float32)
    request = PLAIN | {"seed": np.arange(50), "temperature": 0.8, "top_k": 10}
    draft, _ = sample_draft(logits[:, :1], **request)
    assert (verify_draft(logits, draft[:, None], np.ones(50), **request)[1] == 2).all()


@pytest.mark.parametrize("rule", RULES)
def test_drafting_returns_the_distribution_of_its_token(rule):
    """Filtered for sampled drafts, one-hot for greedy drafts, zero if no token can be drawn."""
    logits = np.log([[0.4, 0.3, 0.2, 0.1]] * 3)
    logits[2] = np.nan
    token, q = sample_draft(logits, **(PLAIN | {"temperature": [1, 0, 1], "top_k": 2, "rule": rule}))
    np.testing.assert_allclose(q, [[4 / 7, 3 / 7, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0]], rtol=1e-6)
    assert token[0] in (0, 1)
    assert token[1:].tolist() == [0, -1]


def test_the_mask_keeps_the_tokens_whose_bit_is_set():
    rng = np.random.default_rng(7)
    logits = rng.normal(size=(2, 3, 70)).astype(np.float16)
    allowed = rng.random((2, 3, 96)) < 0.5
    words = np.packbits(allowed, axis=-1, bitorder="little").view(np.int32)
    masked = token_bitmask(logits, words)
    assert masked.dtype == np.float16
    np.testing.assert_array_equal(masked, np.where(allowed[..., :70], logits, -np.inf))


def test_a_mask_may_have_words_of_any_integer_type():
    logits = np.arange(40, dtype=np.float32)
    words = [-(2**31) + 5, 129]  # tokens 0, 2, 31, 32 and 39
    for mask in (words, np.array(words), np.array(words, np.int32)):
        assert np.flatnonzero(np.isfinite(token_bitmask(logits, mask))).tolist() == [0, 2, 31, 32, 39]


def test_a_rule_is_a_member_a_name_or_one_per_request():
    logits = np.random.default_rng(8).normal(size=(2, 2, 4)).astype(np.float32)
    expected = verify(logits, [[0], [1]], rule=[Rule.REJECTION, Rule.COUPLED])[0].tolist()
    for rule in (["rejection", "coupled"], np.array([1, 0]), ("rejection", Rule.COUPLED)):
        assert verify(logits, [[0], [1]], rule=rule)[0].tolist() == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"temperature": -0.1}, "temperature: a value between 0"),
        ({"temperature": np.nan}, "temperature: a value between 0"),
        ({"top_k": -1}, "top_k: a value between 0"),
        ({"top_p": 1.5}, "top_p: a value between 0 and 1"),
        ({"min_p": [0.5, 0.5]}, r"min_p: one value, or one per request \(1\)"),
        ({"position": -1}, "position: a value between 0"),
        ({"rule": "typical"}, "rule: one of coupled, rejection is needed, got 'typical'"),
        ({"draft_probs": np.ones((1, 2, 4))}, "draft_probs: shape"),
        ({"length": [2]}, "draft_len: one value between 0 and 1"),
        ({"draft": [0, 1]}, "draft_tokens: one column less"),
    ],
)
def test_invalid_arguments_are_rejected_by_name(changes, message):
    arguments = {"logits": np.zeros((1, 2, 4)), "draft": [0]} | changes
    with pytest.raises(ValueError, match=message):
        verify(**arguments)


def test_a_mask_of_the_wrong_width_is_rejected():
    with pytest.raises(ValueError, match="bitmask: int32"):
        token_bitmask(np.zeros((1, 33)), np.zeros((1, 1), np.int32))
