"""The manifest for Kubernetes agrees with the command that it runs. tests/clients validates its schema."""

from pathlib import Path
from typing import Any

import typer
import yaml

from tandemrt.runtime.servers.http.config import KEY_VARIABLE
from tandemrt.runtime.servers.http.server import FLUSH_S
from tests.command_line import app

MANIFEST = Path(__file__).parents[2] / "docs" / "kubernetes.yaml"


def objects() -> dict[str, Any]:
    return {document["kind"]: document for document in yaml.safe_load_all(MANIFEST.read_text())}


def test_the_container_runs_a_command_that_exists() -> None:
    pod = objects()["Deployment"]["spec"]["template"]["spec"]
    [container] = pod["containers"]
    name, *arguments = container["args"]
    commands: Any = typer.main.get_command(app)
    values = commands.commands[name].make_context(name, arguments).params
    [port] = container["ports"]
    assert (values["host"], values["port"]) == ("0.0.0.0", port["containerPort"])
    assert [variable["name"] for variable in container["env"]] == [KEY_VARIABLE]
    [volume] = container["volumeMounts"]
    assert values["models"] == [f"demo={volume['mountPath']}/demo"]
    stop = container["lifecycle"]["preStop"]["sleep"]["seconds"] + values["grace"] + 2 * FLUSH_S
    assert pod["terminationGracePeriodSeconds"] > stop


def test_every_selector_selects_the_pods() -> None:
    by_kind = objects()
    labels = by_kind["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert by_kind["Deployment"]["spec"]["selector"]["matchLabels"] == labels
    assert by_kind["Service"]["spec"]["selector"] == labels
    assert by_kind["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"] == labels
    assert by_kind["PodDisruptionBudget"]["spec"]["minAvailable"] < by_kind["Deployment"]["spec"]["replicas"]
