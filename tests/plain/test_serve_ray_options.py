"""Options with Ray: those without effect are refused, and the application has the values of its arguments."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tandemrt.engines.options.build_options import BuildOptions
from tandemrt.engines.options.options import RuntimeOptions
from tandemrt.engines.validation.errors import BadRequest, TandemError
from tandemrt.runtime.cli import serve_ray
from tandemrt.runtime.servers.http.config import ServerConfig
from tests.plain.test_bundle import write_bundle
from tests.plain.test_serve_options import OPTIONS


@pytest.mark.parametrize("name", OPTIONS)
def test_an_option_without_effect_with_ray_is_refused(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    option, _, value = OPTIONS[name]
    config = ServerConfig(**{name: value})
    refusal = f"{option}: has no effect with --ray, received " if name in serve_ray.UNSUPPORTED else "--ray: needs ray"
    with pytest.raises(TandemError, match=refusal):
        serve_ray.serve_with_ray(["bundle"], BuildOptions(), RuntimeOptions(), config, "1")


@pytest.mark.parametrize("key", [None, "k"])
def test_the_application_for_ray_has_the_values_of_its_arguments(
    key: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = "tandemrt.runtime.servers.ray"
    replicas = SimpleNamespace(ReplicaCount=SimpleNamespace(from_text=lambda text: f"replicas {text}"))
    monkeypatch.setitem(sys.modules, f"{package}.deployment", replicas)
    monkeypatch.setitem(sys.modules, f"{package}.application", SimpleNamespace(application=lambda *values: values))
    monkeypatch.delenv("TANDEMRT_API_KEY", raising=False)
    if key is not None:
        monkeypatch.setenv("TANDEMRT_API_KEY", key)
    monkeypatch.chdir(tmp_path)
    write_bundle(tmp_path / "sample")
    folders, config = {"a": tmp_path / "sample"}, ServerConfig(host="0.0.0.0", api_key=key)
    assert serve_ray.app({"model": "a=sample"}) == (folders, RuntimeOptions(), config, "replicas 1")
    options = RuntimeOptions(num_draft_tokens=2, overlap=False)
    arguments = {"model": "a=sample", "replicas": "1:8", "num_draft_tokens": "2", "overlap": "false"}
    assert serve_ray.app(arguments) == (folders, options, config, "replicas 1:8")
    with pytest.raises(BadRequest, match="model: must be given"):
        serve_ray.app({"replicas": "2"})
