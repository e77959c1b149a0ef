"""Rules of builds over several models: each looks at all of them."""

from types import SimpleNamespace
from typing import Any

import pytest

from tandemrt.engines.contract.dtypes import FLOAT8
from tandemrt.engines.validation.errors import BadRecipe
from tandemrt.export.bundle.kernels import kernels_for
from tandemrt.export.bundle.models import Model
from tandemrt.export.bundle.opening import require_support


def model(**fields: Any) -> Any:
    spec = {"experts": None, "recurrent": None, "latent": None, "head_dims": (64,)}
    spec |= {name: fields.pop(name) for name in spec if name in fields}
    default = {"role": "target", "dtype": "float16", "compute": "float16", "kv_dtype": "float16", "quantization": None}
    return SimpleNamespace(**default | fields, spec=SimpleNamespace(**spec), checkpoint=SimpleNamespace(tensors={}))


@pytest.mark.parametrize("role", ["target", "draft"])
@pytest.mark.parametrize("compute", ["float16", "bfloat16"])
@pytest.mark.parametrize(("layers", "named"), [("experts", "experts"), ("recurrent", "recurrent layers")])
def test_experts_and_recurrent_layers_on_a_cpu_are_in_float32(role: str, compute: str, layers: str, named: str) -> None:
    recipe: Any = SimpleNamespace(backend=SimpleNamespace(device="cpu"))
    message = f"{role}.dtype should be float32, int8 or int4 for a model with {named}; got '{compute}'"
    with pytest.raises(BadRecipe, match=message):
        require_support(model(role=role, dtype=compute, compute=compute, **{layers: object()}), recipe)


@pytest.mark.parametrize(
    ("caches", "attention"),
    [
        (("float16", "float16"), {"attention"}),
        (("float16", FLOAT8), {"attention", "attention_float8"}),
        ((FLOAT8, "float16"), {"attention", "attention_float8"}),
        ((FLOAT8, FLOAT8), {"attention_float8"}),
    ],
)
def test_a_bundle_has_the_kernels_of_the_caches_of_all_its_models(caches: Any, attention: set[str]) -> None:
    recipe: Any = SimpleNamespace(kernel_capabilities=("9.0",), cache="paged", ranks=1)
    target: Any = SimpleNamespace(batch_invariant=False, decoder=None)
    files = kernels_for(recipe, tuple(model(kv_dtype=kind) for kind in caches), target)
    assert {file.name for file in files} & {"attention", "attention_float8"} == attention


@pytest.mark.parametrize(
    ("quantization", "scales"),
    [
        (None, "scales of 1: the checkpoint has none"),
        (SimpleNamespace(float8_cache=False), "scales of 1: the checkpoint has none"),
        (SimpleNamespace(float8_cache=True), "the checkpoint's scales"),
    ],
)
def test_the_note_about_a_float8_cache_says_whose_scales_it_has(quantization: Any, scales: str) -> None:
    [note] = Model.cache_notes(model(kv_dtype=FLOAT8, quantization=quantization))
    assert note.endswith(f"with {scales}")
