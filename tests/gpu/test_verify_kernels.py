"""The kernels of verification and drafting agree with the numpy definition, on the GPU itself.

Float rounding can turn a draw where two tokens are equal to seven digits: such draws are counted and shown.
"""

import numpy as np
import pytest
import torch

from tandemrt.engines.contract.sampling_parameters import FILTERS, SAMPLING_PARAMETERS
from tandemrt.plugins.kernels.compile import compile_kernels, compile_ptx
from tandemrt.plugins.kernels.module import KernelModule, Launch, current_stream
from tandemrt.plugins.kernels.verify import Advance, ProposeLaunch, VerifyLaunch, VerifyWorkspace, parts, stats_parts
from tandemrt.plugins.reference import probabilities, sample_draft, token_bitmask
from tandemrt.plugins.reference.arguments import sampling_vectors
from tandemrt.plugins.reference.filters import filter_logits, finite_logits
from tests.engine.operator_cases import BATCH, case, reference_verify, restricted
from tests.gpu.here import compute_capabilities

if not torch.cuda.is_available():
    pytest.skip("these tests need a CUDA GPU", allow_module_level=True)

SENTINEL = -99
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
CPP_TYPES = {"fp32": "float", "fp16": "fp16", "bf16": "bf16"}
SMALL = [31, 32, 33, 1000, 2049]
AWKWARD = [32_000, 128_001, 151_936]
ADVANCED = 96  # requests that emit every number of tokens


@pytest.fixture(scope="module")
def modules(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kernels")
    compile_kernels(compute_capabilities(), folder, names=["verify"])
    kinds = [(kind, *names) for kind in ("VERIFY_DRAFT", "VERIFY_DRAFT_PROBS") for names in CPP_TYPES.items()]
    source = "".join(f"{kind}({suffix}, {name})\n" for kind, suffix, name in kinds)
    (folder / "verify_one.ptx").write_text(compile_ptx(f'#include "verify_one.cuh"\n{source}', "8.0"))
    return {name: KernelModule.open(folder, name) for name in ("verify", "verify_one")}


def rounded(tensors, dtype):
    return tensors | {"logits": torch.from_numpy(tensors["logits"]).to(DTYPES[dtype]).float().numpy()}


def on_gpu(tensors, dtype):
    copies = {name: torch.from_numpy(np.ascontiguousarray(values)).cuda() for name, values in tensors.items()}
    return copies | {"logits": copies["logits"].to(DTYPES[dtype])}


def outputs(shape):
    filled = {
        "tokens": torch.full(shape, SENTINEL, device="cuda"),
        "count": torch.full(shape[:1], SENTINEL, device="cuda"),
    }
    return filled


def run_verify(modules, tensors, dtype="fp32", *, stats=True, advance=None):
    bound = on_gpu(tensors, dtype)
    bound |= outputs(bound["logits"].shape[:2])
    workspace = VerifyWorkspace(*bound["logits"].shape[:2], torch.device("cuda"))
    VerifyLaunch(modules["verify"], bound, workspace, stats=stats, advance=advance).run()
    for zeros in (workspace.counters, workspace.counts, workspace.arrivals):
        assert not zeros.any()
    return bound["tokens"].cpu().numpy(), bound["count"].cpu().numpy()


def run_one(modules, tensors, dtype):
    """The kernel of the TensorRT plugin, which does a request per block and is given masked logits."""
    masked = tensors | {"logits": token_bitmask(tensors["logits"], tensors["bitmask"])}
    bound = on_gpu(masked, dtype)
    batch, rows, vocab = bound["logits"].shape
    bound |= outputs((batch, rows))
    name = "verify_draft_probs" if "draft_probs" in bound else "verify_draft"
    order = ["logits", "draft_tokens", "draft_len", *SAMPLING_PARAMETERS, "draft_probs"]
    inputs = [bound[key] for key in order if key in bound]
    arguments = (*inputs, np.int32(rows), np.int32(vocab), bound["tokens"], bound["count"])
    launch = Launch(modules["verify_one"].kernel(f"{name}_{dtype}"), (batch, 1, 1), (1024, 1, 1), *arguments)
    launch.run(current_stream(bound["logits"].device))
    return bound["tokens"].cpu().numpy(), bound["count"].cpu().numpy()


def without(tensors, *names):
    return {name: values for name, values in tensors.items() if name not in names}


def differences(mine, theirs):
    return int(((mine[0] != theirs[0]).any(axis=1) | (mine[1] != theirs[1])).sum())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("draft_probs", [True, False])
@pytest.mark.parametrize("window", [0, 1, 2, 3, 4])
@pytest.mark.parametrize("vocab", SMALL)
def test_verification_equals_its_definition(modules, vocab, window, draft_probs, dtype):
    """Mixed rules, filters, dead rows, ragged drafts, per-request seeds; every output element is written."""
    tensors = rounded(case(vocab, window), dtype)
    if not draft_probs:
        tensors = without(tensors, "draft_probs")
    expected = reference_verify(tensors)
    assert differences(run_verify(modules, tensors, dtype), expected) == 0
    if window:
        assert differences(run_one(modules, tensors, dtype), expected) == 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", AWKWARD)
def test_awkward_vocabularies(modules, vocab, dtype, record_property, capsys):
    tensors = rounded(case(vocab, 3, batch=8), dtype)
    expected = reference_verify(tensors)
    mine, one = run_verify(modules, tensors, dtype), run_one(modules, tensors, dtype)
    ties = differences(mine, expected)
    record_property("draws that float rounding turned", ties)
    with capsys.disabled():
        print(f"\nvocabulary {vocab}, {dtype}: {ties} of {len(expected[1])} requests differ by rounding", end="")
    assert differences(one, mine) == 0
    assert ties <= 1


@pytest.mark.parametrize(
    "changes",
    [
        {"temperature": 0},
        {"temperature": 0.8, "rule": 0},
        {"temperature": 0.8, "rule": 1},
        dict.fromkeys(FILTERS, 0),
        *(dict.fromkeys(FILTERS.keys() - {name}, 0) for name in FILTERS),
        {"temperature": 1e-4},
        {"temperature": 1e4},
        {"bitmask": -1},
        {"bitmask": 0},
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_each_mix_of_rules_and_filters_equals_the_definition(modules, dtype, changes):
    tensors = rounded(case(1000, 3), dtype)
    for name, value in changes.items():
        tensors[name] = np.full_like(tensors[name], value)
    assert differences(run_verify(modules, tensors, dtype), reference_verify(tensors)) == 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_without_stats_greedy_and_coupled_requests_need_one_launch(modules, dtype):
    tensors = rounded(case(2049, 4), dtype)
    for name in (*FILTERS, "rule"):
        tensors[name] = np.zeros_like(tensors[name])
    assert differences(run_verify(modules, tensors, dtype, stats=False), reference_verify(tensors)) == 0


def test_no_mask_at_all_allows_everything(modules):
    tensors = case(1000, 3)
    open_mask = tensors | {"bitmask": np.full_like(tensors["bitmask"], -1)}
    assert differences(run_verify(modules, without(tensors, "bitmask")), reference_verify(open_mask)) == 0


def test_requests_do_not_see_each_other(modules):
    tensors = case(2049, 3)
    tokens, _ = run_verify(modules, tensors)
    order = np.random.default_rng(1).permutation(len(tokens))
    np.testing.assert_array_equal(run_verify(modules, {n: v[order] for n, v in tensors.items()})[0], tokens[order])
    for i in range(len(tokens)):
        np.testing.assert_array_equal(
            run_verify(modules, {n: v[i : i + 1] for n, v in tensors.items()})[0][0], tokens[i]
        )


def test_rows_after_the_draft_are_not_read(modules):
    tensors = case(32, 4)
    expected = run_verify(modules, tensors)
    for request, length in enumerate(tensors["draft_len"]):
        tensors["logits"][request, length + 1 :] = np.nan
        tensors["draft_probs"][request, length:] = np.nan
        tensors["draft_tokens"][request, length:] = -5
    assert differences(run_verify(modules, tensors), expected) == 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offset", [1, 2, 3, 5])
def test_views_that_start_anywhere_are_read_in_place(modules, dtype, offset):
    """Logits, mask and probabilities that begin in the middle of a larger tensor, between two stretches of poison."""
    tensors = rounded(case(1000, 3), dtype)
    bound = on_gpu(tensors, dtype) | outputs(tensors["logits"].shape[:2])
    for name in ("logits", "bitmask", "draft_probs"):
        flat = bound[name].reshape(-1)
        larger = torch.full((flat.numel() + 16,), 7, dtype=flat.dtype, device="cuda")
        larger[offset : offset + flat.numel()] = flat
        bound[name] = larger[offset : offset + flat.numel()].view(bound[name].shape)
    VerifyLaunch(modules["verify"], bound, VerifyWorkspace(BATCH, 4, torch.device("cuda")), stats=True).run()
    mine = bound["tokens"].cpu().numpy(), bound["count"].cpu().numpy()
    assert differences(mine, reference_verify(tensors)) == 0


@pytest.mark.parametrize(("cut", "counts"), [("parts", (1, 2, 7, 15)), ("stats_parts", (1, 2, 3, 8))])
def test_the_cut_into_parts_changes_nothing(cut, counts, modules, monkeypatch):
    tensors = rounded(case(32_000, 2, batch=8), "bf16")
    results = []
    for count in counts:
        monkeypatch.setattr(f"tandemrt.plugins.kernels.verify.{cut}", lambda *_, count=count: count)
        results.append(run_verify(modules, tensors, "bf16"))
    assert [differences(result, results[0]) for result in results] == [0] * 4


def test_slots_advance_by_what_is_emitted(modules):
    tensors = case(33, 4, batch=ADVANCED)
    start = torch.arange(ADVANCED, device="cuda")
    newest = torch.stack([start + 200, start + 300], dim=1)
    state = Advance(length=start + 10, position=start + 11, newest=newest.clone())
    tokens, count = run_verify(modules, tensors, advance=state)
    assert set(count) == {0, 1, 2, 3, 4, 5}
    for i in range(ADVANCED):
        text = [*newest[i].tolist(), *tokens[i, : count[i]]]
        assert state.newest[i].tolist() == text[-2:]
        assert int(state.length[i]) == i + 10 + count[i]
        assert int(state.position[i]) == i + 11 + count[i]


def test_a_captured_graph_replays_on_new_contents(modules):
    first, second = case(1000, 3), case(1000, 3, seed=1)
    bound = on_gpu(first, "bf16") | outputs(first["logits"].shape[:2])
    launch = VerifyLaunch(modules["verify"], bound, VerifyWorkspace(BATCH, 4, torch.device("cuda")), stats=True)
    launch.run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch.run()
    for tensors in (second, first):
        for name, values in on_gpu(tensors, "bf16").items():
            bound[name].copy_(values)
        bound["tokens"].fill_(SENTINEL)
        graph.replay()
        mine = bound["tokens"].cpu().numpy(), bound["count"].cpu().numpy()
        assert differences(mine, reference_verify(rounded(tensors, "bf16"))) == 0


def run_propose(modules, tensors, dtype="fp32", *, probs=True, stats=True):
    bound = on_gpu(tensors, dtype)
    batch, _, vocab = bound["logits"].shape  # those of the draft
    bound["token"] = torch.full((batch,), SENTINEL, device="cuda")
    if probs:
        bound["draft_probs"] = torch.full((batch, vocab), float(SENTINEL), device="cuda")
    ProposeLaunch(modules["verify"], bound, VerifyWorkspace(batch, 1, torch.device("cuda")), stats=stats).run()
    return bound["token"].cpu().numpy(), bound["draft_probs"].cpu().numpy() if probs else None


def drafting(tensors):
    return without(tensors, "bitmask", "draft_tokens", "draft_len", "draft_probs")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [*SMALL, *AWKWARD])
def test_drafting_equals_its_definition(modules, vocab, dtype):
    tensors = rounded(drafting(case(vocab, 0, batch=BATCH if vocab < 10_000 else 8)), dtype)
    token, probs = run_propose(modules, tensors, dtype)
    expected, expected_probs = sample_draft(**tensors)
    np.testing.assert_array_equal(token, expected)
    np.testing.assert_allclose(probs, expected_probs, rtol=4e-7, atol=1e-44)
    np.testing.assert_array_equal(run_propose(modules, tensors, dtype, probs=False)[0], expected)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 300.0], ids=lambda scale: f"scale {scale:g}")
@pytest.mark.parametrize("vocab", [33, 2049, 151_936])
@pytest.mark.parametrize("dtype", DTYPES)
def test_top_n_sigma_keeps_the_tokens_of_its_definition(modules, dtype, vocab, scale):
    """Exactly those, alone and before other filters: all implementations sum the same integers. bfloat16 rows of large
    logits are counted by their scores, others by their values."""
    tensors = drafting(case(vocab, 0, batch=BATCH if vocab < 10_000 else 8))
    batch = len(tensors["seed"])
    tensors = rounded(tensors | {"logits": np.float32(scale) * tensors["logits"]}, dtype)
    tensors["temperature"] = np.resize(np.float32([0.6, 1.4, 30]), batch)
    tensors["top_n_sigma"] = np.resize(np.float32([0.1, 1, 2.5, 3.5, 100]), batch)
    for others in (dict.fromkeys(FILTERS.keys() - {"top_n_sigma"}, 0), {"top_p": 0}):
        request = tensors | {name: np.zeros_like(tensors[name]) for name in others}
        probs, expected = run_propose(modules, request, dtype)[1], sample_draft(**request)[1]
        np.testing.assert_array_equal(probs > 0, expected > 0)
        np.testing.assert_allclose(probs, expected, rtol=4e-7, atol=1e-44)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("known", "vocab"), [(1, 33), (8, 33), (33, 1000), (700, 1000), (2049, 32_000), (32_000, 128_256)]
)
def test_a_reduced_vocabulary_draws_as_the_full_one_with_the_rest_masked(modules, known, vocab, dtype):
    whole = rounded(drafting(case(vocab, 0, batch=BATCH if vocab < 10_000 else 8)), dtype)
    part, barred = restricted(whole, known)
    token, probs = run_propose(modules, part, dtype)
    expected, probs_of_all = run_propose(modules, barred, dtype)
    np.testing.assert_array_equal(token, expected)
    np.testing.assert_array_equal(token, sample_draft(**part)[0])
    np.testing.assert_allclose(probs, probs_of_all[:, part["target_ids"]], rtol=4e-7, atol=1e-44)
    np.testing.assert_array_equal(run_propose(modules, part, dtype, probs=False)[0], expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_verification_accepts_the_probabilities_that_drafting_returned(modules, dtype):
    """Equal logits give equal bits of p and q, so nothing is rejected."""
    tensors = case(1000, 1, batch=200) | {"temperature": np.full(200, 0.9, np.float32), "rule": np.ones(200, np.int64)}
    tensors |= {"logits": np.random.default_rng(3).normal(size=(200, 2, 1000)).astype(np.float32)}
    tensors |= {"bitmask": np.full_like(tensors["bitmask"], -1), "draft_len": np.ones(200, np.int64)}
    token, probs = run_propose(modules, drafting(tensors) | {"logits": tensors["logits"][:, :1]}, dtype)
    tensors |= {"draft_tokens": token[:, None], "draft_probs": probs[:, None]}
    assert (run_verify(modules, tensors, dtype)[1] == 2).all()


@pytest.mark.parametrize("vocab", [33, 1000])
def test_the_noise_decides_as_it_is_defined(modules, vocab):
    """With equal logits the largest noise wins, so each of 4,000 draws reads its own bits of every token."""
    rng = np.random.default_rng(5)
    requests = {"temperature": np.ones(4000, np.float32), "seed": rng.integers(-(2**63), 2**63, 4000)}
    requests |= {"position": rng.integers(0, 2**62, 4000), "rule": rng.integers(0, 2, 4000)}
    requests |= {name: np.zeros(4000, parameter.dtype) for name, parameter in FILTERS.items()}
    tensors = {"logits": np.zeros((4000, 1, vocab), np.float32), **requests}
    np.testing.assert_array_equal(
        run_propose(modules, tensors, probs=False, stats=False)[0], sample_draft(**tensors)[0]
    )


@pytest.mark.parametrize("rule", [0, 1])
def test_the_first_token_has_the_distribution_of_the_target(modules, rule):
    """200,000 requests of a vocabulary of 8, masked and filtered, each with a draft from its own distribution."""
    count, vocab, series = 50_000, 8, 4  # a launch takes at most 65,535 requests
    rng = np.random.default_rng(11)
    target, draft = 1.5 * rng.normal(size=(2, vocab)).astype(np.float32)
    shared = {"temperature": 0.9, "top_n_sigma": 2.2, "top_k": 6, "top_p": 0.95, "min_p": 0.02}
    request = {name: np.full(count, value, SAMPLING_PARAMETERS[name].dtype) for name, value in shared.items()}
    request |= {"position": np.full(count, 3), "rule": np.full(count, rule)}
    bitmask = np.full((count, 2, 1), 0b11110111, np.int32)
    observed = np.zeros(vocab, np.int64)
    for start in range(0, series * count, count):
        request["seed"] = np.arange(start, start + count)
        token, probs = run_propose(modules, {"logits": np.broadcast_to(draft, (count, 1, vocab)), **request})
        tensors = {"logits": np.broadcast_to(target, (count, 2, vocab)), "bitmask": bitmask, **request}
        tensors |= {"draft_tokens": token[:, None], "draft_len": np.ones(count, np.int64)}
        tokens, _ = run_verify(modules, tensors | {"draft_probs": probs[:, None]})
        observed += np.bincount(tokens[:, 0], minlength=vocab)
    count *= series
    vectors = sampling_vectors(1, **shared, seed=0, position=0, rule=rule)
    masked = token_bitmask(target[None, None], bitmask[:1, :1])
    expected = probabilities(filter_logits(finite_logits(masked), vectors))[0, 0].astype(float)
    assert observed[expected == 0].sum() == 0
    inside = expected > 0
    expected = expected[inside] / expected[inside].sum()
    chi = ((observed[inside] - count * expected) ** 2 / (count * expected)).sum()
    freedom = inside.sum() - 1
    assert freedom >= 3
    assert (chi - freedom) / np.sqrt(2 * freedom) < 4


def test_a_small_batch_fills_the_device_and_a_large_one_does_not_flood_it():
    assert parts(5, 128_256, 132) * 5 >= 132
    assert parts(320, 128_256, 132) * 320 < 4000
    assert parts(1, 31, 132) == 1
    assert stats_parts(5, 128_256, 132) * 5 >= 80
    assert stats_parts(320, 128_256, 132) == stats_parts(1, 31, 132) == 1
