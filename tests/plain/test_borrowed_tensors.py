"""What a draft head without tensors of its own takes of the target: which, and of which targets."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tandemrt.engines.validation.errors import BadCheckpoint
from tandemrt.export.bundle import opened_head
from tandemrt.export.bundle.draft_kinds import FEATURE_DRAFTS
from tandemrt.export.bundle.opened_head import EMBEDDING, LM_HEAD_WEIGHT, _borrowed
from tandemrt.export.read.layer import Scales

TABLE, HEAD = "model.embed_tokens.weight", "lm_head.weight"
PLAIN = Scales(attention=0.125)


def borrowed(
    kind: str = "dflash",
    scales: Scales = PLAIN,
    *,
    own: tuple[str, ...] = (),
    tied: bool = False,
    draft_vocab: int = 64,
    dtypes: tuple[str, str] = ("bfloat16", "bfloat16"),
) -> dict[str, Any]:
    """The names of the target's tensors by the head's, of a head with the tensors ``own``."""
    stored = {name: SimpleNamespace(name=name, dtype=dtype) for name, dtype in zip((TABLE, HEAD), dtypes, strict=True)}
    target = SimpleNamespace(hidden=32, tied=tied, scales=scales)
    head = SimpleNamespace(draft_vocab=draft_vocab, vocab=64, layer=SimpleNamespace(hidden=32))
    checkpoint = SimpleNamespace(folder=Path("head"), tensors=dict.fromkeys(own))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(opened_head, "with_graph_names", lambda *_: SimpleNamespace(tensors=stored))
        taken = _borrowed(FEATURE_DRAFTS[kind], *cast("Any", (checkpoint, head, None, target)))
    return {name: tensor.name for name, tensor in taken.items() if tensor is not None}


@pytest.mark.parametrize("kind", ["dflash", "dflash2", "dspark", "mtp"])
def test_a_head_of_all_tokens_takes_the_embedding_and_the_head_of_the_target(kind: str) -> None:
    assert borrowed(kind) == {EMBEDDING: TABLE, LM_HEAD_WEIGHT: HEAD}
    assert borrowed(kind, tied=True) == {EMBEDDING: TABLE, LM_HEAD_WEIGHT: TABLE}
    assert borrowed(kind, own=(EMBEDDING,)) == {LM_HEAD_WEIGHT: HEAD}
    assert borrowed(kind, own=(LM_HEAD_WEIGHT,)) == {EMBEDDING: TABLE}
    assert borrowed(kind, draft_vocab=63) == {EMBEDDING: TABLE}


@pytest.mark.parametrize("kind", ["eagle3", "peagle"])
def test_a_head_with_a_head_of_its_own_takes_the_embedding_alone(kind: str) -> None:
    assert borrowed(kind) == {EMBEDDING: TABLE}


@pytest.mark.parametrize(
    ("scales", "name", "other"),
    [
        ({"embedding": 2.0}, EMBEDDING, LM_HEAD_WEIGHT),
        ({"logits": 2.0}, LM_HEAD_WEIGHT, EMBEDDING),
        ({"logits_softcap": 30.0}, LM_HEAD_WEIGHT, EMBEDDING),
    ],
)
def test_a_tensor_that_the_target_scales_is_not_borrowed(scales: dict[str, float], name: str, other: str) -> None:
    scaled = replace(PLAIN, **scales)
    assert [*borrowed(scales=scaled, own=(name,))] == [other]
    with pytest.raises(BadCheckpoint, match=f"a head without '{name}' takes the target's, which this target scales"):
        borrowed(scales=scaled, own=(other,))


@pytest.mark.parametrize(("at", "name"), [(0, TABLE), (1, HEAD)])
def test_a_quantized_tensor_is_not_borrowed(at: int, name: str) -> None:
    dtypes = ["bfloat16", "bfloat16"]
    dtypes[at] = "int8"
    with pytest.raises(BadCheckpoint, match=f"takes the target's '{name}', which should be .*, it is int8"):
        borrowed(dtypes=(dtypes[0], dtypes[1]))
