"""Serve a bundle with Ray Serve: each replica runs the OpenAI endpoints of ``tandemrt serve``.

::

    pip install '.[cpu,serve]' 'ray[serve]'
    serve run tools.ray_serve:app bundle=engines/built/demo replicas=2

serves OpenAI clients at http://127.0.0.1:8000/v1.
"""

from contextlib import ExitStack
from pathlib import Path

from fastapi import FastAPI
from ray import serve

from tandemrt.engines.bundle.bundle import Bundle
from tandemrt.engines.options.options import RuntimeOptions
from tandemrt.runtime.servers.openai.app import create_app
from tandemrt.runtime.servers.openai.config import ServerConfig
from tandemrt.runtime.servers.openai.server import open_models


def app(args: dict[str, str]) -> serve.Application:
    """Return the application. ``args``: ``bundle``, a folder on every machine, and ``replicas``, their number."""
    folder = Path(args["bundle"]).resolve()
    name = Bundle.read(folder).name

    def build() -> FastAPI:  # runs in the replica
        stack = ExitStack()
        models = stack.enter_context(open_models({name: folder}, RuntimeOptions(threads=1)))
        api = create_app(models, ServerConfig())
        api.state.opened = stack  # keeps the bundle open while the replica lives
        return api

    replica = serve.deployment(num_replicas=int(args.get("replicas", 1)), max_ongoing_requests=256)
    return replica(serve.ingress(build)()).bind()
