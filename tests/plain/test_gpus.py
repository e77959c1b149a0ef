"""Which GPUs an engine was built for."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandemrt.engines.gpus import covers, target_of

capabilities = st.tuples(st.integers(5, 15), st.integers(0, 9))


def written(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"


@given(st.lists(capabilities, min_size=1, unique=True), capabilities)
def test_an_engine_covers_exactly_the_capabilities_it_names(named, capability) -> None:
    assert covers(target_of(list(map(written, named))), capability) == (capability in named)


@given(capabilities, capabilities)
def test_a_capability_and_all_later_ones(oldest, capability) -> None:
    assert covers(target_of([written(oldest)], and_later=True), capability) == (capability >= oldest)


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
def test_targets_as_manifests_write_them(target: str, capability: tuple[int, int], expected: bool) -> None:
    assert covers(target, capability) is expected
