"""The model that Triton's Python backend runs: a decoupled one that does its own in-flight batching."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import triton_python_backend_utils as pb_utils

from tandemrt.engines import serving
from tandemrt.engines.deployment import Deployment
from tandemrt.engines.errors import BadRepository, TandemError
from tandemrt.runtime.llm import LLM
from tandemrt.runtime.triton.metrics import Publisher
from tandemrt.runtime.triton.requests import read_request
from tandemrt.runtime.triton.responses import Outbox, Reply, refuse
from tandemrt.runtime.triton.watch import Watch
from tandemrt.runtime.warmup import warm_up


class TritonPythonModel:
    """One instance: an open bundle, its loop, and the threads between it and the server.

    ``execute`` only reads and queues requests; their responses come from the outbox's thread as the rounds commit.
    """

    def initialize(self, args: Mapping[str, str]) -> None:
        """Open the bundle and warm it up; the server says that the model is ready when this returns."""
        config = json.loads(args["model_config"])
        _check_tensors(config)
        deployment = Deployment.read({key: value["string_value"] for key, value in config["parameters"].items()})
        bundle = Path(args["model_repository"]) / args["model_version"] / deployment.bundle
        self._llm = LLM(bundle, device=_device(args), **deployment.llm_arguments())
        warm_up(self._llm)
        self._outbox = Outbox()
        self._watch = Watch(self._llm)
        self._publisher = Publisher(
            self._llm.metrics,
            {"requests_waiting": lambda: self._llm.waiting, "requests_running": lambda: self._llm.running},
            {
                "model": args["model_name"],
                "version": args["model_version"],
                "instance": args["model_instance_name"],
                # A model loaded anew lives beside the old one for a while. With the labels of the old one its metrics
                # would be the same objects to the server, which crashes on them once the old one takes them back.
                "process": str(os.getpid()),
            },
        )

    def execute(self, requests: list[Any]) -> None:
        """Take requests in. One that cannot be served is refused, and nothing else is touched."""
        for request in requests:
            sender = request.get_response_sender()
            try:
                self._take(request, sender)
            except BaseException as error:  # a request without an answer would keep the server waiting
                if not isinstance(error, TandemError):
                    pb_utils.Logger.log_error(f"a request failed before it was queued: {error!r}")
                refuse(sender, error)

    def finalize(self) -> None:
        """End what still runs, send its last responses and let the server unload the model."""
        if hasattr(self, "_llm"):
            self._llm.close()
        if hasattr(self, "_publisher"):
            self._outbox.close()
            self._watch.close()
            self._publisher.close()

    def _take(self, request: Any, sender: Any) -> None:
        tensors = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
        ask = read_request(tensors, json.loads(request.parameters() or "{}"), timeout_us=request.timeout())
        reply = Reply(sender, ask, self._outbox)
        reply.start(self._llm)
        self._watch.add(reply)


def _check_tensors(config: Mapping[str, Any]) -> None:
    for kind, specs in (("input", serving.inputs()), ("output", serving.OUTPUTS)):
        found = {(tensor["name"], tensor["data_type"], tuple(map(int, tensor["dims"]))) for tensor in config[kind]}
        known = {(spec.name, serving.config_type(spec), spec.dims) for spec in specs}
        if found != known:
            differing = sorted({name for name, _, _ in found ^ known})
            raise BadRepository(
                f"config.pbtxt: its {kind}s must be those of this version of TandemRT, differing in "
                f"{', '.join(differing)}; write the repository again with: tandemrt export triton"
            )


def _device(args: Mapping[str, str]) -> str:
    return f"cuda:{args['model_instance_device_id']}" if args["model_instance_kind"] == "GPU" else "cpu"
