"""``serve run tandemrt.serve_ray:app model=demo replicas=2``: bundles on a Ray cluster, with OpenAI's protocol."""

from tandemrt.runtime.cli.serve_ray import app

__all__ = ["app"]
