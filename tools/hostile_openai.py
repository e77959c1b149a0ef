"""What a stream of ``tandemrt serve`` feels while others are hostile, and the server's memory afterwards.

python -m tools.hostile_openai engines/built/demo
"""

import http.client
import json
import socket
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from tools.bench_openai import server
from tools.memory import resident_mb

SECONDS = 4.0  # of each attack; the victim comes after the first of them


def main(bundle: Annotated[Path, typer.Argument(help="The demo's bundle.")]) -> None:
    """Ask for the same stream alone and during each attack."""
    with server(bundle, threads=1, clients=256) as (port, process):
        attacks: dict[str, tuple[Callable[[], None], int]] = {
            "nothing": (lambda: time.sleep(0.1), 1),
            "connections opened and closed": (lambda: _connect(port).close(), 4),
            "hang-ups": (lambda: _hang_up(port), 8),
            "chats of 10,000 messages": (lambda: _send(port, _chat(10_000)), 2),
            "bodies of 100 MB": (lambda: _send(port, b" " * (100 << 20)), 1),
        }
        _victim(port)  # what is slow the first time
        table = Table("meanwhile", "first token, ms", "longest gap, ms", "same text", "server, MB", show_edge=False)
        alone = ""
        for name, (attack, threads) in attacks.items():
            first, gap, text = _during(attack, threads, port)
            alone = alone or text
            table.add_row(name, f"{first:.0f}", f"{gap:.0f}", str(text == alone), f"{resident_mb(process):.0f}")
        Console().print(table)


def _during(attack: Callable[[], None], threads: int, port: int) -> tuple[float, float, str]:
    end = time.perf_counter() + SECONDS

    def repeat() -> None:
        while time.perf_counter() < end:
            try:
                attack()
            except OSError:  # the server has answered and hung up
                continue

    attackers = [threading.Thread(target=repeat) for _ in range(threads)]
    for attacker in attackers:
        attacker.start()
    time.sleep(SECONDS / 4)
    felt = _victim(port)
    for attacker in attackers:
        attacker.join()
    return felt


def _victim(port: int) -> tuple[float, float, str]:
    """Milliseconds to the first piece and between two, at most, and the text."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    asked = {"prompt": "x", "stream": True, "ignore_eos": True, "max_tokens": 200, "seed": 1, "user": "victim"}
    times = [time.perf_counter()]
    connection.request("POST", "/v1/completions", json.dumps(asked))
    text = ""
    for line in connection.getresponse():
        if line.startswith(b"data: {"):
            times.append(time.perf_counter())
            text += json.loads(line[6:])["choices"][0]["text"]
    connection.close()
    waits = [1e3 * (later - earlier) for earlier, later in pairwise(times)]
    return waits[0], max(waits[1:]), text


def _connect(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port))


def _hang_up(port: int) -> None:
    body = b'{"prompt": "x", "stream": true, "ignore_eos": true, "user": "attacker"}'
    with _connect(port) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
        )
        time.sleep(0.01)


def _chat(messages: int) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": "x"}] * messages, "user": "attacker"}).encode()


def _send(port: int, body: bytes) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    try:
        connection.request("POST", "/v1/chat/completions", body)
        connection.getresponse().read()
    finally:
        connection.close()


if __name__ == "__main__":
    typer.run(main)
