"""Clients of the Triton tests: plain HTTP, tritonclient's gRPC, and /metrics."""

import http.client
import json
import queue
import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import tritonclient.grpc as grpc
from tritonclient.utils import np_to_triton_dtype

from tests.waiting import PATIENCE_S
from tools.serve import TritonServer


@dataclass(frozen=True)
class Client:
    """A client of one model on one server. Every call has a timeout."""

    server: TritonServer
    model: str

    def generate(self, **body: Any) -> tuple[int, dict[str, Any]]:
        """POST to generate; return the status and the answer."""
        connection = self.post("generate", body)
        try:
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())
        finally:
            connection.close()

    def stream(self, **body: Any) -> list[dict[str, Any]]:
        """POST to generate_stream; return all events."""
        connection = self.post("generate_stream", {"stream": True} | body)
        try:
            return list(events(connection.getresponse()))
        finally:
            connection.close()

    def post(self, endpoint: str, body: dict[str, Any] | bytes) -> http.client.HTTPConnection:
        connection = http.client.HTTPConnection("127.0.0.1", self.server.http, timeout=PATIENCE_S)
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        connection.request("POST", f"/v2/models/{self.model}/{endpoint}", data)
        return connection

    def grpc(self, *, outputs: tuple[str, ...] = (), timeout_us: int | None = None, **inputs: Any) -> list[Any]:
        """Send one request on a gRPC stream; return all responses. The last one is an error if the request failed."""
        with GrpcStream(self) as stream:
            stream.send(outputs=outputs, timeout_us=timeout_us, **inputs)
            return stream.responses()

    def metrics(self) -> dict[str, float]:
        """Return this model's own metrics by name and distinguishing label, summed over instances."""
        connection = http.client.HTTPConnection("127.0.0.1", self.server.metrics, timeout=PATIENCE_S)
        connection.request("GET", "/metrics")
        lines = connection.getresponse().read().decode().splitlines()
        connection.close()
        values = {}
        for line in lines:
            match = re.fullmatch(r"(tandemrt_\w+)\{(.*)\} (\S+)", line)
            if match and f'model="{self.model}"' in match[2]:
                own = re.findall(r'(?:reason|phase|position|le)="[^"]*"', match[2])
                name = match[1] + (f"{{{own[0]}}}" if own else "")
                values[name] = values.get(name, 0.0) + float(match[3])
        return values

    def counted(self, earlier: dict[str, float]) -> dict[str, float]:
        """Return the change of counters since ``earlier``."""
        return {name: value - earlier.get(name, 0.0) for name, value in self.metrics().items()}


class GrpcStream:
    """A gRPC stream that sends requests and collects responses."""

    def __init__(self, client: Client, *, name: str | None = None) -> None:
        """``name`` identifies the client in the metadata of the stream."""
        self._model = client.model
        self._client = grpc.InferenceServerClient(f"127.0.0.1:{client.server.grpc}")
        self._queue: queue.Queue[tuple[Any, Any]] = queue.Queue()
        headers = None if name is None else {"tandemrt-client": name}
        self._client.start_stream(callback=lambda result, error: self._queue.put((result, error)), headers=headers)

    def send(self, *, outputs: tuple[str, ...] = (), timeout_us: int | None = None, **inputs: Any) -> None:
        self._client.async_stream_infer(
            self._model,
            [tensor(name, value) for name, value in inputs.items()],
            outputs=[grpc.InferRequestedOutput(name) for name in outputs] or None,
            timeout=timeout_us,
            enable_empty_final_response=True,
        )

    def next(self) -> Any:
        """Return the next result, or raise the error that arrived instead."""
        result, error = self._queue.get(timeout=PATIENCE_S)
        if error is not None:
            raise error
        return result

    def responses(self) -> list[Any]:
        """Responses up to and including the final one."""
        results = []
        while True:
            results.append(self.next())
            if results[-1].get_response().parameters["triton_final_response"].bool_param:
                return results

    def cancel(self) -> None:
        self._client.stop_stream(cancel_requests=True)

    def __enter__(self) -> "GrpcStream":
        return self

    def __exit__(self, *_: object) -> None:
        self._client.stop_stream()
        self._client.close()


def events(answer: http.client.HTTPResponse) -> Any:
    """Yield the events of a stream as they arrive."""
    for line in answer:
        if line.startswith(b"data: "):
            yield json.loads(line[6:])


def tensor(name: str, value: Any) -> grpc.InferInput:
    """A 1-D input. Integers are int64 as the server declares, and a seed keeps its 64 bits."""
    items = value if isinstance(value, list) else [value]
    dtype: Any = {bool: np.bool_, int: np.int64, float: np.float32, str: np.object_}[type(items[0])]
    array = np.array(
        [item.encode() if isinstance(item, str) else item for item in items], np.uint64 if name == "seed" else dtype
    )
    request_input = grpc.InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype))
    request_input.set_data_from_numpy(array)
    return request_input


def text(results: list[Any], name: str = "text_output") -> str:
    """The joined text of some responses."""
    arrays = [result.as_numpy(name) for result in results]
    return b"".join(array[0] for array in arrays if array is not None and array.size).decode()


def token_ids(answer: dict[str, Any]) -> list[int]:
    """The tokens of an answer. The server writes a list of one element as a number."""
    ids = answer["token_ids"]
    return ids if isinstance(ids, list) else [ids]
