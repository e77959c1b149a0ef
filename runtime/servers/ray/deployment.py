"""How many replicas Ray runs, and what each takes of its machine."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ray import serve

from tandemrt.engines.bundle.bundle import Bundle
from tandemrt.engines.options.options import RuntimeOptions
from tandemrt.engines.validation.errors import BadRequest, quoted

LOG = {"log_level": "WARNING", "enable_access_log": False}  # the gateway logs requests, as `tandemrt serve` does


@dataclass(frozen=True)
class ReplicaCount:
    """Number of replicas: from ``least`` to ``most``, by the number of requests."""

    least: int
    most: int

    @classmethod
    def from_text(cls, text: str) -> "ReplicaCount":
        """Read ``4`` or ``1:8``. Raises BadRequest."""
        least, _, most = text.partition(":")
        try:
            count = cls(int(least), int(most or least))
        except ValueError:
            count = cls(0, 0)
        if not 1 <= count.least <= count.most:
            raise BadRequest(f"replicas: must be a number such as 4, or a range such as 1:8, received {quoted(text)}")
        return count


def replicated(
    kind: type, folders: Mapping[str, Path], options: RuntimeOptions, replicas: ReplicaCount
) -> tuple[serve.Deployment, RuntimeOptions]:
    """Return the deployment of ``kind``, which opens the bundles in ``folders``, and the options for them."""
    bundles = [Bundle.read(folder) for folder in folders.values()]
    on_gpu = any(bundle.device(options.device) != "cpu" for bundle in bundles)
    if not on_gpu and options.threads is None:
        options = RuntimeOptions(**options.arguments() | {"threads": 1})
    ranks = max(1 + len(bundle.manifest.ranks) for bundle in bundles)
    count: dict[str, Any] = {"num_replicas": replicas.least}
    if replicas.least < replicas.most:
        scaling = {"min_replicas": replicas.least, "max_replicas": replicas.most}
        count = {"autoscaling_config": scaling | {"target_ongoing_requests": slots_of(folders)}}
    deployment = serve.deployment(
        kind,
        **count,
        logging_config=LOG,
        ray_actor_options={"num_gpus": ranks} if on_gpu else {"num_cpus": options.threads},
    )
    return deployment, options


def slots_of(folders: Mapping[str, Path]) -> int:
    """Return how many requests one replica runs at a time."""
    return sum(Bundle.read(folder).limits.batch for folder in folders.values())
