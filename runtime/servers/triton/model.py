"""The model class that Triton's Python backend loads: decoupled, with its own in-flight batching."""

import json
import os
from collections.abc import Mapping
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from tandemrt.engines.options.deployment import Deployment
from tandemrt.engines.parameters import server_tensors
from tandemrt.engines.validation.errors import BadRepository, TandemError
from tandemrt.runtime.llm.llm import LLM
from tandemrt.runtime.llm.warmup import warm_up
from tandemrt.runtime.servers.triton.disconnects import DisconnectMonitor
from tandemrt.runtime.servers.triton.metrics import MetricsPublisher
from tandemrt.runtime.servers.triton.request_tensors import parse_request
from tandemrt.runtime.servers.triton.response_stream import ResponseStream
from tandemrt.runtime.servers.triton.responses import send_error
from tandemrt.runtime.servers.triton.send_queue import SendQueue
from tandemrt.runtime.workers.clients import Client
from tandemrt.runtime.workers.fair import FairExecutor

_PARSER_THREADS = 8  # one client occupies all but one at most


class TritonPythonModel:
    """One model instance: an open bundle, its engine loop, and the threads between the loop and the server.

    ``execute`` only accepts requests. A few threads parse and queue them in fair shares, because reading a prompt or a
    schema takes time. The send queue's thread sends responses as rounds are committed.
    """

    def initialize(self, args: Mapping[str, str]) -> None:
        """Open the bundle and warm it up. The server reports the model as ready when this returns."""
        config = json.loads(args["model_config"])
        _check_tensors(config)
        deployment = Deployment.read({key: value["string_value"] for key, value in config["parameters"].items()})
        bundle = Path(args["model_repository"]) / args["model_version"] / deployment.bundle
        self._llm = LLM(bundle, device=_device(args), **deployment.llm_arguments())
        warm_up(self._llm)
        self._parsers = FairExecutor(_PARSER_THREADS, "tandemrt-reader")
        self._queue = SendQueue()
        self._monitor = DisconnectMonitor()
        self._publisher = MetricsPublisher(
            self._llm.metrics,
            {
                "requests_waiting": lambda: self._llm.waiting,
                "requests_running": lambda: self._llm.running,
                "kv_cache_usage": lambda: self._llm.kv_cache_usage,
            },
            {
                "model": args["model_name"],
                "version": args["model_version"],
                "instance": args["model_instance_name"],
                # A reloaded model runs for a while together with the old one. With equal labels both would share
                # metric objects, and the server crashes on them after the old model removes them.
                "process": str(os.getpid()),
            },
        )

    def execute(self, requests: list[Any]) -> None:
        """Accept requests. A request that cannot be served gets an error and affects no other."""
        for request in requests:
            sender = request.get_response_sender()
            try:
                # A copy, because the server reuses the arrays after this returns.
                tensors = {tensor.name(): np.array(tensor.as_numpy()) for tensor in request.inputs()}
                parameters = json.loads(request.parameters() or "{}")
                client = Client(user=str(parameters.get(server_tensors.CLIENT, "")))
                done = self._parsers.submit(client, self._submit, tensors, parameters, request.timeout(), sender)
                done.add_done_callback(partial(_on_submitted, sender))
            except BaseException as error:  # a request without a response would keep the server waiting
                _reject(sender, error)

    def finalize(self) -> None:
        """Cancel running requests, send their last responses and let the server unload the model."""
        if hasattr(self, "_llm"):
            self._llm.close()
        if hasattr(self, "_parsers"):
            self._parsers.shutdown(wait=True)
        if hasattr(self, "_publisher"):
            self._queue.close()
            self._monitor.close()
            self._publisher.close()

    def _submit(
        self, tensors: Mapping[str, np.ndarray], parameters: Mapping[str, Any], timeout_us: int, sender: Any
    ) -> None:
        parsed = parse_request(tensors, parameters, timeout_us=timeout_us)
        stream = ResponseStream(self._llm, sender, parsed, self._queue)
        stream.submit()
        self._monitor.add(stream)


def _on_submitted(sender: Any, done: "Future[None]") -> None:
    error = done.exception()
    if error is not None:
        _reject(sender, error)


def _reject(sender: Any, error: BaseException) -> None:
    if not isinstance(error, TandemError):
        pb_utils.Logger.log_error(f"a request failed before it was queued: {error!r}")
    send_error(sender, error)


def _check_tensors(config: Mapping[str, Any]) -> None:
    for kind, specs in (("input", server_tensors.inputs()), ("output", server_tensors.OUTPUTS)):
        received = {(tensor["name"], tensor["data_type"], tuple(map(int, tensor["dims"]))) for tensor in config[kind]}
        known = {(spec.name, server_tensors.config_type(spec), spec.dims) for spec in specs}
        if received != known:
            differing = sorted({name for name, _, _ in received ^ known})
            raise BadRepository(
                f"config.pbtxt: its {kind}s must be those of this version of TandemRT, differing in "
                f"{', '.join(differing)}; write the repository again with: tandemrt export triton"
            )


def _device(args: Mapping[str, str]) -> str:
    return f"cuda:{args['model_instance_device_id']}" if args["model_instance_kind"] == "GPU" else "cpu"
