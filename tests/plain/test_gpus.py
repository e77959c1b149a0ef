"""GPU targets of an engine, and the kernels for them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandemrt.engines.contract.gpus import built_for, capabilities_for, covers

KNOWN = ("8.0", "8.6", "8.9", "9.0", "10.0", "12.0")

capabilities = st.tuples(st.integers(5, 15), st.integers(0, 9))


def written(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"


@given(st.lists(capabilities, min_size=1, unique=True), capabilities)
def test_an_engine_covers_exactly_the_capabilities_it_names(named, capability) -> None:
    assert covers(built_for(list(map(written, named))), capability) == (capability in named)


@given(capabilities, capabilities)
def test_a_capability_and_all_later_ones(oldest, capability) -> None:
    assert covers(built_for([written(oldest)], and_later=True), capability) == (capability >= oldest)


@pytest.mark.parametrize(
    ("target", "capability", "expected"),
    [
        ("sm_86+sm_120", (12, 0), True),
        ("sm_86+sm_120", (9, 0), False),
        ("sm_80-up", (9, 0), True),
        ("sm_80-up", (7, 5), False),
        ("cuda", (9, 0), True),
        ("cpu", (9, 0), False),
    ],
)
def test_targets_have_the_format_of_manifests(target: str, capability: tuple[int, int], expected: bool) -> None:
    assert covers(target, capability) is expected


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("sm_90", ("9.0",)),
        ("sm_86+sm_120+sm_121", ("8.6", "12.0")),
        ("sm_75+sm_80", ("8.0",)),
        ("sm_75", ()),
        ("sm_87+sm_103+sm_110", ("8.6", "10.0")),
        ("sm_86-up", ("8.6", "8.9", "9.0", "10.0", "12.0")),
        ("sm_80-up", KNOWN),
        ("cpu", ()),
    ],
)
def test_kernels_for_the_gpus_of_a_target(target: str, expected: tuple[str, ...]) -> None:
    assert capabilities_for(target, KNOWN) == expected


@given(st.lists(capabilities, min_size=1, unique=True), st.booleans())
def test_every_gpu_of_a_target_gets_the_latest_kernels_that_it_can_run(named, and_later) -> None:
    chosen = capabilities_for(built_for(list(map(written, named)), and_later=and_later), KNOWN)
    for capability in named:
        runnable = [known for known in KNOWN if tuple(map(int, known.split("."))) <= capability]
        assert not runnable or runnable[-1] in chosen
