"""TandemRT behind Ray Serve: replicas of what ``tandemrt serve`` answers with, each with the bundle open.

::

    pip install 'tandemrt[cpu,serve]' 'ray[serve]'
    serve run tools.ray_serve:app bundle=engines/built/demo replicas=2

answers OpenAI's clients at http://127.0.0.1:8000/v1.
"""

from contextlib import ExitStack
from pathlib import Path

from fastapi import FastAPI
from ray import serve

from tandemrt.engines.bundle import Bundle
from tandemrt.engines.options import RuntimeOptions
from tandemrt.runtime.serve.app import application
from tandemrt.runtime.serve.server import opened


def app(args: dict[str, str]) -> serve.Application:
    """Return the application: ``bundle`` is a folder on every machine, ``replicas`` how many open it."""
    folder = Path(args["bundle"]).resolve()
    name = Bundle.read(folder).name

    def build() -> FastAPI:  # in the replica
        stack = ExitStack()
        models = stack.enter_context(opened({name: folder}, RuntimeOptions(threads=1)))
        api = application(models, api_key=None, max_body=4 << 20)
        api.state.opened = stack  # holds the bundle open as long as the replica lives
        return api

    replica = serve.deployment(num_replicas=int(args.get("replicas", 1)), max_ongoing_requests=256)
    return replica(serve.ingress(build)()).bind()
