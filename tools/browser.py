"""A headless Chromium for tests and pictures, driven with its debugging protocol over two pipes."""

import base64
import itertools
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
_FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--remote-debugging-pipe")


class Page:
    """One page of a browser of its own.

    ``with Page() as page`` starts the browser and ends it. A call raises EOFError if the browser ends meanwhile.

    Attributes:
        errors: texts of what the page wrote to its console, and of its uncaught errors.
    """

    def __init__(self, width: int = 1200, height: int = 900, *, dark: bool = False) -> None:
        self.errors: list[str] = []
        self._size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self._scheme = "dark" if dark else "light"
        self._numbers = itertools.count(1)
        self._session: dict[str, str] = {}

    def __enter__(self) -> "Page":
        assert BROWSER is not None
        self._folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        reads, commands = os.pipe()
        answers, writes = os.pipe()
        # The browser reads file descriptor 3 and writes 4. The parent's ends close on exec.
        moves = [(os.POSIX_SPAWN_DUP2, reads, 3), (os.POSIX_SPAWN_DUP2, writes, 4)]
        silent = [(os.POSIX_SPAWN_OPEN, each, os.devnull, os.O_WRONLY, 0) for each in (1, 2)]
        command = [BROWSER, *_FLAGS, f"--user-data-dir={self._folder.name}"]
        self._process = os.posix_spawn(BROWSER, command, dict(os.environ), file_actions=[*silent, *moves])
        os.close(reads)
        os.close(writes)
        self._commands, self._answers = os.fdopen(commands, "wb"), os.fdopen(answers, "rb")
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")
        self.call("Emulation.setDeviceMetricsOverride", **self._size)
        scheme = {"name": "prefers-color-scheme", "value": self._scheme}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._commands.close()  # ends the browser
        self._answers.close()
        os.waitpid(self._process, 0)
        self._folder.cleanup()

    def open(self, url: str) -> None:
        """Go to ``url``; its scripts may still run when this returns."""
        self.call("Page.navigate", url=url)

    def evaluate(self, script: str) -> Any:
        """Return the JSON value of an expression in the page. Raises AssertionError if it throws."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def wait_for(self, script: str, seconds: float = 60.0) -> Any:
        """Return the value of an expression as soon as it is true in JavaScript's sense. Raises TimeoutError."""
        value = self.evaluate(
            f"""new Promise(resolve => {{
              const end = performance.now() + {1000 * seconds};
              const look = () => {{
                let value = null;
                try {{ value = {script}; }} catch {{ }}
                if (value || performance.now() > end) resolve(value); else setTimeout(look, 20);
              }};
              look();
            }})"""
        )
        if not value:
            raise TimeoutError(f"not true within {seconds:g} s: {script}")
        return value

    def screenshot(self, file: Path) -> None:
        """Write the whole page as a PNG, as wide as the window."""
        height = self.evaluate("document.documentElement.scrollHeight")
        self.call("Emulation.setDeviceMetricsOverride", **self._size | {"height": height})
        file.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Return the result of a method of the protocol. Raises AssertionError with its error."""
        number = next(self._numbers)
        session = {"sessionId": self._session["sessionId"]} if self._session else {}
        message = {"id": number, "method": method, "params": parameters, **session}
        self._commands.write(json.dumps(message).encode() + b"\0")
        self._commands.flush()
        while True:
            answer = self._read()
            if answer.get("id") == number:
                assert "error" not in answer, answer
                result: dict[str, Any] = answer["result"]
                return result
            self._hear(answer)

    def _read(self) -> dict[str, Any]:
        data = bytearray()
        while not data.endswith(b"\0"):
            byte = self._answers.read(1)
            if not byte:
                raise EOFError("the browser has ended")
            data += byte
        message: dict[str, Any] = json.loads(data[:-1])
        return message

    def _hear(self, event: Mapping[str, Any]) -> None:
        params = event.get("params", {})
        if event.get("method") == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.errors.append(details.get("exception", {}).get("description", details["text"]))
        elif event.get("method") == "Runtime.consoleAPICalled":
            self.errors.append(" ".join(str(each.get("value")) for each in params["args"]))
        elif event.get("method") == "Log.entryAdded":
            self.errors.append(params["entry"]["text"])
