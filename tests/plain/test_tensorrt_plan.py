"""Which profile a call takes, which calls an engine must take, and how much memory a bundle needs."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandemrt.engines.bundle.manifest import Limits
from tandemrt.engines.contract import contract
from tandemrt.engines.recipe.recipe import Recipe
from tandemrt.engines.validation.errors import BackendUnavailable, BadBundle
from tandemrt.export.compile.tensorrt.profiles import decoder_profiles, head_profiles, resolve
from tandemrt.runtime.device.backends.tensorrt.plan import choose_profile, require_memory, require_profiles

TOKENS = {
    "prefill": {"token_ids": ((1, 1), (1, 64), (8, 64))},
    "window": {"token_ids": ((1, 1), (8, 5), (8, 5))},
    "single": {"token_ids": ((1, 1), (8, 1), (8, 1))},
}
PROFILES = list(TOKENS.values())
SIZES = {"layers": 2, "kv_heads": 2, "head_dim": 32, "capacity": 101, "vocab": 320}
DECODER = contract.decoder(**SIZES, dtype="float16")
WITH_IMAGES = contract.decoder(**SIZES, dtype="float16", position_rows=3, image_width=64)


def uses(recipe: Recipe, bindings: contract.Contract) -> list[dict]:
    """The profiles that the exporter gives an engine, as an opened engine tells them."""
    named = head_profiles(recipe, bindings) if "bitmask" in str(bindings) else decoder_profiles(recipe)
    shapes = {binding.name: binding.shape for binding in bindings.inputs}
    resolved = [resolve(shapes, profile) for profile in named.values()]
    return [{name: tuple(zip(*ranges, strict=True)) for name, ranges in profile.items()} for profile in resolved]


def recipe(batch: int, window: int, chunk: int) -> Recipe:
    draft = {"kind": "ngram", "num_draft_tokens": window} if window else {"kind": "none"}
    sizes = {"batch": batch, "length": 96, "prefill_chunk": chunk}
    return Recipe.model_validate({"name": "r", "target": {"checkpoint": "t"}, "draft": draft, "limits": sizes})


def limits(batch: int, window: int, chunk: int) -> Limits:
    return Limits(batch=batch, length=96, capacity=96 + window + 1, num_draft_tokens=window, prefill_chunk=chunk)


@pytest.mark.parametrize(
    ("shape", "use"),
    [
        ((8, 5), "window"),
        ((3, 5), "window"),
        ((8, 1), "single"),
        ((1, 1), "single"),
        ((1, 64), "prefill"),
        ((1, 33), "prefill"),
        ((2, 17), "prefill"),
        ((8, 65), None),
        ((9, 5), None),
        ((8, 5, 1), None),
    ],
)
def test_a_call_takes_the_profile_tuned_closest_to_it(shape: tuple[int, ...], use: str | None) -> None:
    index = choose_profile(PROFILES, {"token_ids": shape})
    assert (None if index is None else list(TOKENS)[index]) == use


@pytest.mark.parametrize(("length", "index"), [(4, 0), (16, 1)])
def test_the_tuned_shape_counts_and_not_the_largest_one(length: int, index: int) -> None:
    profiles = [{"token_ids": ((1, 1), (1, 4), (1, 64))}, {"token_ids": ((1, 1), (1, 16), (1, 16))}]
    assert choose_profile(profiles, {"token_ids": (1, length)}) == index


def test_one_input_out_of_range_rules_a_profile_out() -> None:
    profiles = [profile | {"write_index": ((1,), (4,), (4,))} for profile in PROFILES]
    assert choose_profile(profiles, {"token_ids": (8, 5), "write_index": (8,)}) is None


sizes = st.tuples(st.integers(1, 64), st.integers(0, 8), st.integers(1, 96))


@given(sizes)
def test_profiles_of_the_exporter_take_every_call_of_the_runtime(given_sizes: tuple[int, int, int]) -> None:
    built, limited = recipe(*given_sizes), limits(*given_sizes)
    decoder = uses(built, DECODER)
    require_profiles("target", DECODER, limited, decoder)
    require_profiles("target", WITH_IMAGES, limited, uses(built, WITH_IMAGES))
    if limited.num_draft_tokens:  # a draft model has a window of at least one
        require_profiles("draft", DECODER, limited, decoder)
    for draft_probs in (False, True):
        verify = contract.verify(vocab=320, dtype="float16", draft_probs=draft_probs)
        require_profiles("verify", verify, limited, uses(built, verify))


@pytest.mark.parametrize("larger", [(5, 4, 16), (4, 5, 16), (4, 4, 17)])
def test_an_engine_without_a_profile_for_what_the_limits_allow_is_refused(larger: tuple[int, int, int]) -> None:
    profiles = uses(recipe(4, 4, 16), DECODER)
    require_profiles("target", DECODER, limits(4, 4, 16), profiles)
    with pytest.raises(BadBundle, match=r"engine 'target': a profile must take every call .* none takes batch \d"):
        require_profiles("target", DECODER, limits(*larger), profiles)


def test_memory_that_does_not_suffice_is_refused_part_by_part() -> None:
    needed = {"engine target": 16 << 30, "caches of target": 4 << 30}
    require_memory(needed, 20 << 30)
    with pytest.raises(BackendUnavailable) as caught:
        require_memory(needed, (20 << 30) - 1)
    assert "20.00 GiB of free memory for this bundle (engine target 16.00 GiB, caches of target 4.00 GiB)" in str(
        caught.value
    )
