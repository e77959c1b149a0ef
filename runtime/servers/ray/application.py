"""Build the Ray Serve application: gateways in front of replicas."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ray import serve
from ray.serve.config import RequestRouterConfig
from ray.serve.experimental.consistent_hash_router import ConsistentHashRouter
from starlette.applications import Starlette
from starlette.routing import Mount

from tandemrt.engines.bundle.bundle import Bundle
from tandemrt.engines.options.options import RuntimeOptions
from tandemrt.engines.validation.errors import BadRequest, quoted
from tandemrt.runtime.servers.openai.access_log import log_to_stderr
from tandemrt.runtime.servers.openai.config import MAX_CONNECTIONS, ServerConfig
from tandemrt.runtime.servers.openai.server import guarded
from tandemrt.runtime.servers.ray.gateway import Gateway
from tandemrt.runtime.servers.ray.replica import Replica

REPLICAS_PER_GATEWAY = 4
ONGOING_PER_SLOT = 2  # requests of a replica: the next ones are parsed while others run; further ones go elsewhere
_LOG = {"log_level": "WARNING", "enable_access_log": False}  # the gateway logs requests, as `tandemrt serve` does
_DRAIN_S = 86_400.0  # without --grace: until the requests have finished


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


class GatewayDeployment:
    """A gateway in a process of its own. Ray takes the application from it."""

    def __init__(self, replicas: Any, config: ServerConfig, log_level: str) -> None:
        log_to_stderr(log_level)
        self._replicas = replicas
        self._config = config

    def __serve_build_asgi_app__(self) -> Any:
        return guarded(Starlette(routes=[Mount("/", Gateway(self._replicas, self._config))]), self._config)


def application(
    folders: Mapping[str, Path], options: RuntimeOptions, config: ServerConfig, replicas: ReplicaCount, log_level: str
) -> serve.Application:
    """Return the application that serves the bundles in ``folders``, which every machine must have."""
    bundles = [Bundle.read(folder) for folder in folders.values()]
    on_gpu = any(bundle.device(options.device) != "cpu" for bundle in bundles)
    if not on_gpu and options.threads is None:
        options = RuntimeOptions(**options.given() | {"threads": 1})
    ranks = max(1 + len(bundle.manifest.ranks) for bundle in bundles)
    slots = sum(bundle.limits.batch for bundle in bundles)
    count: dict[str, Any] = {"num_replicas": replicas.least}
    if replicas.least < replicas.most:
        scaling = {"min_replicas": replicas.least, "max_replicas": replicas.most, "target_ongoing_requests": slots}
        count = {"autoscaling_config": scaling}
    replica = serve.deployment(
        Replica,
        **count,
        logging_config=_LOG,
        max_ongoing_requests=ONGOING_PER_SLOT * slots,
        max_queued_requests=options.queue_limit,
        graceful_shutdown_timeout_s=_DRAIN_S if config.grace_s is None else config.grace_s,
        ray_actor_options={"num_gpus": ranks} if on_gpu else {"num_cpus": options.threads},
        request_router_config=RequestRouterConfig(
            request_router_class=ConsistentHashRouter, request_router_kwargs={"num_fallback_replicas": replicas.most}
        ),
    ).bind(dict(folders), options, config, log_level)
    gateway = serve.deployment(
        serve.ingress()(GatewayDeployment),
        name="Gateway",
        logging_config=_LOG,
        num_replicas=1 + replicas.most // REPLICAS_PER_GATEWAY,
        max_ongoing_requests=MAX_CONNECTIONS,
        ray_actor_options={"num_cpus": 0},
    )
    return gateway.bind(replica, config, log_level)
