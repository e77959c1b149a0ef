"""The exported decoder computes what transformers computes, on the engine that serves it."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.engine.decoding import CONFIGS, VOCAB, Decoder, edit_config, expected_logits, make_checkpoint

LOWERINGS = ["length", "mask", "basic", "grouped", "paged"]
WINDOW = 5


@pytest.fixture(scope="module", params=CONFIGS)
def checkpoint(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    return folder, make_checkpoint(request.param, folder)


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory):
    folder = tmp_path_factory.mktemp("qwen3")
    return folder, make_checkpoint("qwen3", folder)


def sequence(length: int, seed: int = 0) -> list[int]:
    return torch.randint(0, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def assert_close(logits: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-4) -> None:
    torch.testing.assert_close(logits, expected, atol=tolerance, rtol=0)


@pytest.mark.parametrize("attention", LOWERINGS)
def test_prefill_then_token_by_token_equals_transformers(checkpoint, attention):
    folder, model = checkpoint
    decode = Decoder(folder, attention, batch=1)
    tokens = sequence(33)
    expected = expected_logits(model, tokens)
    assert_close(decode([tokens[:21]], [0])[0], expected[:21])
    for at in range(21, 33):
        assert_close(decode([[tokens[at]]], [at])[0], expected[at : at + 1])


@pytest.mark.parametrize("attention", LOWERINGS)
def test_a_ragged_batch_of_windows_equals_transformers_row_by_row(checkpoint, attention):
    """Rows of different pasts, a row prefilled in padded chunks, an idle row, and a rollback in the middle."""
    folder, model = checkpoint
    decode = Decoder(folder, attention, batch=4)
    lengths, idle = [17, 3, 9, 11], 2
    rows = [sequence(35, seed) for seed in range(4)]

    # Prefill in chunks of 7: a row that has ended writes padding after its end.
    done = [0] * 4
    while done != lengths:
        step = [min(7, length - start) for length, start in zip(lengths, done, strict=True)]
        chunk = [[*row[start : start + n], *[1] * (7 - n)] for row, start, n in zip(rows, done, step, strict=True)]
        last = [[max(n - 1, 0)] for n in step]
        logits = decode(chunk, done, last)
        done = [start + n for start, n in zip(done, step, strict=True)]
        for i in range(4):
            if step[i]:
                assert_close(logits[i, 0], expected_logits(model, rows[i][: done[i]])[-1])

    for accepted in [[5, 2, 0, 1], [1, 5, 0, 3]]:
        # Drafts agree with the row as far as they are accepted and are wrong from there on: a window to roll back.
        windows = [
            [row[start + i] if i < n else (row[start + i] + 1) % VOCAB for i in range(WINDOW)]
            for row, start, n in zip(rows, done, accepted, strict=True)
        ]
        logits = decode(windows, done)
        for i in range(4):
            if i != idle:
                expected = expected_logits(model, rows[i][: done[i]] + windows[i])
                assert_close(logits[i], expected[done[i] :])
        done = [start + n for start, n in zip(done, accepted, strict=True)]

    logits = decode([[row[start]] for row, start in zip(rows, done, strict=True)], done)
    for i in range(4):  # the idle row too: windows written after its end did not change its cache
        assert_close(logits[i], expected_logits(model, rows[i][: done[i] + 1])[-1:])


@pytest.mark.parametrize("attention", LOWERINGS)
def test_the_last_place_of_the_cache_can_be_used(qwen3, attention):
    folder, model = qwen3
    tokens = sequence(19)
    decode = Decoder(folder, attention, batch=1, capacity=19)
    decode([tokens[:14]], [0])
    assert_close(decode([tokens[14:]], [14])[0], expected_logits(model, tokens)[14:])


@pytest.mark.parametrize("attention", LOWERINGS)
def test_score_rows_pick_any_rows_in_any_order(qwen3, attention):
    folder, model = qwen3
    rows = [sequence(9, 1), sequence(9, 2)]
    picks = [[8, 0, 0, 3], [2, 7, 8, 2]]
    logits = Decoder(folder, attention, batch=2)(rows, [0, 0], picks)
    for i in range(2):
        assert_close(logits[i], expected_logits(model, rows[i])[picks[i]])


@pytest.mark.parametrize("attention", LOWERINGS)
def test_float16_stays_near_float32(checkpoint, attention):
    folder, model = checkpoint
    decode = Decoder(folder, attention, batch=1, dtype="float16")
    tokens = sequence(20)
    expected = expected_logits(model, tokens)
    logits = torch.cat([decode([tokens[:15]], [0])[0], decode([tokens[15:]], [15])[0]])
    assert_close(logits, expected, tolerance=0.02 * expected.abs().max().item())


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16])
def test_weights_stored_in_half_precision_compute_in_float32(tmp_path, stored):
    make_checkpoint("qwen3 tied with yarn", tmp_path, dtype=stored)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    tokens = sequence(20)
    assert_close(Decoder(tmp_path, "length", batch=1)([tokens], [0])[0], expected_logits(model, tokens))


def test_a_checkpoint_in_several_files_is_one_model(tmp_path):
    model = make_checkpoint("qwen3", tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    tokens = sequence(12)
    assert_close(Decoder(tmp_path, "length", batch=1)([tokens], [0])[0], expected_logits(model, tokens))


@pytest.mark.parametrize(
    "case", ["llama with llama3 scaling", "qwen3 tied with yarn", "llama biased with linear scaling"]
)
def test_rope_fields_of_older_configs_mean_the_same(tmp_path, case):
    model = make_checkpoint(case, tmp_path)
    rope = dict(model.config.rope_parameters)
    theta, kind = rope.pop("rope_theta"), rope.pop("rope_type")
    edit_config(tmp_path, rope_parameters=None, rope_theta=theta, rope_scaling=rope | {"type": kind})
    tokens = sequence(30)
    assert_close(Decoder(tmp_path, "mask", batch=1)([tokens], [0])[0], expected_logits(model, tokens))
