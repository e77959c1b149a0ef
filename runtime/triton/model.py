"""The model that Triton's Python backend runs: a decoupled one that does its own in-flight batching."""

import json
import os
from collections.abc import Mapping
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from tandemrt.engines import serving
from tandemrt.engines.deployment import Deployment
from tandemrt.engines.errors import BadRepository, TandemError
from tandemrt.runtime.fair import FairExecutor
from tandemrt.runtime.llm import LLM
from tandemrt.runtime.triton.metrics import Publisher
from tandemrt.runtime.triton.requests import read_request
from tandemrt.runtime.triton.responses import Outbox, Reply, refuse
from tandemrt.runtime.triton.watch import Watch
from tandemrt.runtime.warmup import warm_up

_READERS = 8  # threads: those of one client are at most all but one


class TritonPythonModel:
    """One instance: an open bundle, its loop, and the threads between it and the server.

    ``execute`` only takes requests in. They are read and queued by a few threads, in fair shares, because a prompt or
    a schema takes time; their responses come from the outbox's thread as the rounds commit.
    """

    def initialize(self, args: Mapping[str, str]) -> None:
        """Open the bundle and warm it up; the server says that the model is ready when this returns."""
        config = json.loads(args["model_config"])
        _check_tensors(config)
        deployment = Deployment.read({key: value["string_value"] for key, value in config["parameters"].items()})
        bundle = Path(args["model_repository"]) / args["model_version"] / deployment.bundle
        self._llm = LLM(bundle, device=_device(args), **deployment.llm_arguments())
        warm_up(self._llm)
        self._readers = FairExecutor(_READERS, "tandemrt-reader")
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
                # Copied: what the server lent is its own again when this returns.
                tensors = {tensor.name(): np.array(tensor.as_numpy()) for tensor in request.inputs()}
                parameters = json.loads(request.parameters() or "{}")
                client = str(parameters.get(serving.CLIENT, ""))
                taken = self._readers.submit(client, self._take, tensors, parameters, request.timeout(), sender)
                taken.add_done_callback(partial(_answered, sender))
            except BaseException as error:  # a request without an answer would keep the server waiting
                _refuse(sender, error)

    def finalize(self) -> None:
        """End what still runs, send its last responses and let the server unload the model."""
        if hasattr(self, "_llm"):
            self._llm.close()
        if hasattr(self, "_readers"):
            self._readers.shutdown(wait=True)
        if hasattr(self, "_publisher"):
            self._outbox.close()
            self._watch.close()
            self._publisher.close()

    def _take(
        self, tensors: Mapping[str, np.ndarray], parameters: Mapping[str, Any], timeout_us: int, sender: Any
    ) -> None:
        ask = read_request(tensors, parameters, timeout_us=timeout_us)
        reply = Reply(sender, ask, self._outbox)
        reply.start(self._llm)
        self._watch.add(reply)


def _answered(sender: Any, taken: "Future[None]") -> None:
    error = taken.exception()
    if error is not None:
        _refuse(sender, error)


def _refuse(sender: Any, error: BaseException) -> None:
    if not isinstance(error, TandemError):
        pb_utils.Logger.log_error(f"a request failed before it was queued: {error!r}")
    refuse(sender, error)


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
