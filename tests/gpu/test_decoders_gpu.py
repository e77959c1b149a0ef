"""Cut decoders of every family on a CUDA device, against transformers in float32."""

from functools import partial
from pathlib import Path

import pytest
import torch

from tandemrt.export.model.support import unsupported
from tandemrt.export.read.spec import ModelSpec
from tandemrt.plugins.kernels.compile import compile_kernels
from tests.engine.decoding import CONFIGS, SLIDING, VOCAB, Decoder, expected_logits, make_checkpoint, open_steps
from tests.families.cases import FAMILIES
from tests.gpu.here import compute_capabilities

CAPACITY = 170  # three blocks, the last one not full
CALLS = [(50, 37), (50, 50), (7, 7), (1, 1), (5, 5), (40, 40)]  # new tokens of two rows: chunks, windows, one token
SIZES = {"hidden_size": 128, "head_dim": 32}  # a head size that kernels are made for
# Families with sizes of their own: rotary embeddings that are written out for a head size, and heads without a field.
_OWN = ("phi4-mini", "qwen3_5", "qwen3_5_moe", "qwen3_next", "falcon", "falcon 40b", "falcon 11b")
_LATENT = [case for case, make in FAMILIES.items() if "kv_lora_rank" in make().to_dict()]
WIDE: dict[str, dict[str, int]] = {case: {} for case in (*_OWN, *_LATENT)}
WIDE |= dict.fromkeys(("granite 4", "granite 4 dense"), SIZES | {"mamba_n_heads": 16})  # twice hidden_size / 16
SHARE = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 6e-2}  # of the largest logit, that rounding may cost


def paged(family: str) -> bool:
    """Whether models of a family run over a paged cache; tests/engine/test_families.py holds those that do not."""
    return unsupported(ModelSpec.from_hf(FAMILIES[family]().to_dict()), "paged", CAPACITY) is None


CASES = [*CONFIGS, *SLIDING, *filter(paged, FAMILIES)]


def worst(errors: torch.Tensor, case: str, dtype: str) -> float:
    """The largest of the tokens' errors; the median where rounding lets some of them choose other experts.

    The median also for random recurrent layers and inputs of single layers (Gemma 4 E2B), which amplify rounding:
    transformers in bfloat16 errs by up to 0.3 of the largest logit of these models.
    """
    spec = ModelSpec.from_hf(FAMILIES[case]().to_dict()) if case in FAMILIES else None
    parts = () if spec is None else (spec.experts, spec.recurrent, spec.variants.inputs)
    amplifies = any(part is not None for part in parts)
    return float(errors.median() if amplifies and dtype != "float32" else errors.max())


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kernels")
    names = [
        "attention",
        "experts",
        "latent_attention",
        "linear_attention",
        "residual_norm",
        "short_convolution",
        "swiglu",
    ]
    compile_kernels(compute_capabilities(), folder, names=[*names, "short_convolution"], head_dims=[32, 64])
    return folder


PACKED = [  # tokens of the window of both rows, and of their runs; padding
    (0, (70, 33), 25),
    (0, (0, 66), 0),
    (3, (31, 1), 2),
    (1, (5, 0), 0),
    (5, (0, 0), 0),
]


@pytest.mark.parametrize("dtype", SHARE)
@pytest.mark.parametrize("case", CASES)
def test_logits_of_packed_calls_equal_transformers(tmp_path: Path, kernels: Path, case: str, dtype: str) -> None:
    """Runs of both texts, then the windows of both, in one call."""
    open_engine = partial(open_steps, folder=tmp_path, device=torch.device("cuda", 0), kernels=kernels)
    model = make_checkpoint(case, tmp_path, sizes=WIDE.get(case, SIZES))
    texts = [torch.randint(0, VOCAB, (160,), generator=torch.Generator().manual_seed(i)).tolist() for i in range(2)]
    expected = [expected_logits(model, text) for text in texts]
    largest, errors = max(float(logits.abs().max()) for logits in expected), []
    with torch.inference_mode(), torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
        decode = Decoder(tmp_path, "paged", 2, dtype, CAPACITY, device="cuda", open_engine=open_engine)
        done = [0, 0]
        for query, counts, padding in PACKED:
            runs = [(row, done[row], texts[row][done[row] : done[row] + count]) for row, count in enumerate(counts)]
            places = [start + len(new) for _, start, new in runs]
            windows = [text[at : at + query] for text, at in zip(texts, places, strict=True)]
            packed_logits = decode.packed([0, 1], windows, places, runs, padding if sum(counts) else 0)
            wanted = [logits[at : at + query] for logits, at in zip(expected, places, strict=True)]
            wanted += [expected[row][start : start + len(new)] for row, start, new in runs]
            errors.append((packed_logits - torch.cat(wanted)).abs().amax(-1))
            done = [at + query for at in places]
    assert worst(torch.cat(errors), case, dtype) <= SHARE[dtype] * largest


@pytest.mark.parametrize("dtype", SHARE)
@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers_in_chunks_windows_and_single_tokens(
    tmp_path: Path, kernels: Path, case: str, dtype: str
) -> None:
    open_engine = partial(open_steps, folder=tmp_path, device=torch.device("cuda", 0), kernels=kernels)
    model = make_checkpoint(case, tmp_path, sizes=WIDE.get(case, SIZES))
    rows = [torch.randint(0, VOCAB, (160,), generator=torch.Generator().manual_seed(i)).tolist() for i in range(2)]
    expected = [expected_logits(model, row) for row in rows]
    errors = []
    with torch.inference_mode(), torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
        decode = Decoder(tmp_path, "paged", 2, dtype, CAPACITY, device="cuda", open_engine=open_engine)
        done = [0, 0]
        for steps in CALLS:
            size = max(steps)
            logits = decode([row[start : start + size] for row, start in zip(rows, done, strict=True)], done)
            for i, step in enumerate(steps):
                difference = logits[i, :step] - expected[i][done[i] : done[i] + step]
                errors.append(difference.abs().amax(-1))
                done[i] += step
    largest = max(float(logits.abs().max()) for logits in expected)
    error = worst(torch.cat(errors), case, dtype)
    print(f"{case}, {dtype}: {error:.1e} of {largest:.1f}")
    assert error <= SHARE[dtype] * largest
