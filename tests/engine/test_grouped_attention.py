"""The graph of a CPU bundle: what it computes for a token has the same bits, whatever it is computed together with."""

from pathlib import Path

import pytest
import torch

from tests.engine.decoding import VOCAB, Decoder, expected_logits, make_checkpoint

CAPACITY, ROWS, PAST = 160, 8, 80
CASES = {
    # Wide enough for every blocking of a matmul: along the inner dimension (256) and over several tiles of the outer.
    "llama tied": {"hidden_size": 320, "intermediate_size": 600, "num_attention_heads": 20},
    "llama biased with linear scaling": {},
    "qwen3 tied with yarn": {},
    "mistral sliding": {},
    "qwen3 sliding in its second layer": {},
}


@pytest.fixture(scope="module", params=CASES)
def checkpoint(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    sizes = CASES[request.param] | {"max_position_embeddings": 256}
    return folder, make_checkpoint(request.param, folder, sizes=sizes)


def texts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return torch.randint(0, VOCAB, (ROWS, CAPACITY), generator=generator).tolist()


def prefill(decode: Decoder, row: int, text: list[int], start: int, end: int) -> None:
    """A chunk of one row's prompt, as the runtime calls it: nothing is scored."""
    inputs = {
        "token_ids": torch.tensor([text[start:end]]),
        "write_index": torch.tensor([start]),
        "score_rows": torch.zeros(1, 0, dtype=torch.int64),
        "logits": torch.zeros(1, 0, VOCAB),
    }
    decode.engine.bind(inputs | {name: cache[row : row + 1] for name, cache in decode.caches.items()}).run()


def prefilled(folder: Path, cuts: list[int] | None = None) -> Decoder:
    """Row r holds PAST - 9 r tokens of its text, computed in chunks that end at ``cuts``."""
    decode = Decoder(folder, "grouped", batch=ROWS, capacity=CAPACITY)
    for row, text in enumerate(texts()):
        length = PAST - 9 * row
        ends = [cut for cut in cuts or [] if cut < length] + [length]
        for start, end in zip([0, *ends], ends, strict=False):
            prefill(decode, row, text, start, end)
    return decode


def scored(decode: Decoder, rows: int, *, window: int, tokens: int) -> torch.Tensor:
    """[rows, tokens, vocab] for the next ``tokens`` of the first ``rows`` rows, ``window`` in a call."""
    lengths, parts = [PAST - 9 * row for row in range(rows)], []
    batch = {name: cache[:rows].clone() for name, cache in decode.caches.items()}
    whole, decode.caches = decode.caches, batch
    for at in range(0, tokens, window):
        count = min(window, tokens - at)
        fed = [text[n + at : n + at + count] for text, n in zip(texts(), lengths, strict=False)]
        parts.append(decode(fed, [n + at for n in lengths]))
    decode.caches = whole
    return torch.cat(parts, dim=1)


def test_a_prompt_and_what_follows_equal_transformers(checkpoint):
    folder, model = checkpoint
    logits = scored(prefilled(folder, [1, 2, 64]), ROWS, window=5, tokens=12)
    for row, text in enumerate(texts()):
        length = PAST - 9 * row
        expected = expected_logits(model, text[: length + 12])[length:]
        torch.testing.assert_close(logits[row], expected, atol=1e-4, rtol=0)


def test_a_token_has_the_same_bits_in_any_window_and_batch(checkpoint):
    folder, _ = checkpoint
    decode = prefilled(folder)
    alone = scored(decode, 1, window=1, tokens=64)
    for rows, window in ((1, 2), (1, 5), (1, 8), (1, 64), (2, 1), (2, 5), (5, 3), (8, 1), (8, 5), (8, 8)):
        assert torch.equal(scored(decode, rows, window=window, tokens=64)[0], alone[0]), (rows, window)
    together = scored(decode, ROWS, window=5, tokens=10)
    assert torch.equal(together, scored(decode, ROWS, window=1, tokens=10))


@pytest.mark.parametrize("cuts", [[1], [64], [1, 2, 3, 5, 70, 71], list(range(1, PAST))])
def test_a_prompt_leaves_the_same_bits_wherever_it_was_cut(checkpoint, cuts):
    folder, _ = checkpoint
    whole, cut = prefilled(folder), prefilled(folder, cuts)
    for name, cache in whole.caches.items():
        for row in range(ROWS):
            length = PAST - 9 * row
            assert torch.equal(cache[row, :, :length], cut.caches[name][row, :, :length]), (name, row)
