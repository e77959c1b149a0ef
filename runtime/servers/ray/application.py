"""Build the Ray Serve application: gateways in front of replicas."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ray import serve
from ray.serve.config import RequestRouterConfig
from ray.serve.experimental.consistent_hash_router import ConsistentHashRouter
from starlette.applications import Starlette
from starlette.routing import Mount

from tandemrt.engines.options.options import RuntimeOptions
from tandemrt.runtime.servers.http.access_log import log_to_stderr
from tandemrt.runtime.servers.http.config import MAX_CONNECTIONS, ServerConfig
from tandemrt.runtime.servers.http.server import guarded
from tandemrt.runtime.servers.ray.deployment import LOG, ReplicaCount, replicated, slots_of
from tandemrt.runtime.servers.ray.gateway import Gateway
from tandemrt.runtime.servers.ray.replica import Replica

REPLICAS_PER_GATEWAY = 4
ONGOING_PER_SLOT = 2  # requests of a replica: the next ones are parsed while others run; further ones go elsewhere
_DRAIN_S = 86_400.0  # without --grace: until the requests have finished


class GatewayDeployment:
    """A gateway in a process of its own. Ray takes the application from it."""

    def __init__(self, replicas: Any, config: ServerConfig) -> None:
        log_to_stderr(config.log_level)
        self._replicas = replicas
        self._config = config

    def __serve_build_asgi_app__(self) -> Any:
        return guarded(Starlette(routes=[Mount("/", Gateway(self._replicas, self._config))]), self._config)


def application(
    folders: Mapping[str, Path], options: RuntimeOptions, config: ServerConfig, replicas: ReplicaCount
) -> serve.Application:
    """Return the application that serves the bundles in ``folders``, which every machine must have."""
    deployment, options = replicated(Replica, folders, options, replicas)
    replica = deployment.options(
        max_ongoing_requests=ONGOING_PER_SLOT * slots_of(folders),
        max_queued_requests=options.queue_limit,
        graceful_shutdown_timeout_s=_DRAIN_S if config.grace_s is None else config.grace_s,
        request_router_config=RequestRouterConfig(
            request_router_class=ConsistentHashRouter, request_router_kwargs={"num_fallback_replicas": replicas.most}
        ),
    ).bind(dict(folders), options, config)
    gateway = serve.deployment(
        serve.ingress()(GatewayDeployment),
        name="Gateway",
        logging_config=LOG,
        num_replicas=1 + replicas.most // REPLICAS_PER_GATEWAY,
        max_ongoing_requests=MAX_CONNECTIONS,
        ray_actor_options={"num_cpus": 0},
    )
    return gateway.bind(replica, config)
