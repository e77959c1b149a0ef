"""Attacks on the process of the Python API, and on the files of the bundle that it or a server has open."""

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from threading import Lock
from typing import Any

from tandemrt.engines.bundle.bundle import Bundle
from tandemrt.engines.bundle.digest import holds_weights
from tandemrt.engines.bundle.manifest import FILE_NAME
from tandemrt.engines.parameters.sampling import SamplingParams
from tandemrt.engines.validation.errors import TandemError
from tandemrt.runtime.llm.llm import LLM
from tools.quality.attack.frontends import Frontend, copied, refused
from tools.quality.soak.faults import Faults, faulty_threads

_FIELDS: dict[str, Any] = {"prompt": "x", "max_tokens": 20, "ignore_eos": True, "seed": 1}
_ONE_AT_A_TIME = Lock()  # attacks that change what all attackers share


def file_attacks(frontend: Frontend) -> dict[str, Callable[[], str]]:
    """Return attacks on the weights of the bundle that ``frontend`` has open. Each mends the files at its end."""
    return {
        "weights truncated in place": lambda: _damaged(frontend, lambda content: content[:100]),
        "weights overwritten in place": lambda: _damaged(frontend, lambda content: bytes(len(content))),
    }


def process_attacks(frontend: Frontend) -> dict[str, Callable[[], str]]:
    """Return attacks from within the process of the Python API."""
    return {
        "threads refused": lambda: _without_threads(frontend),
        "a manifest that is a fifo": lambda: _opened(lambda manifest: os.mkfifo(manifest)),
        "a manifest that is a device": lambda: _opened(lambda manifest: manifest.symlink_to("/dev/zero")),
        "a second model, truncated": lambda: _second_model(frontend.bundle),
    }


def _damaged(frontend: Frontend, damage: Callable[[bytes], bytes]) -> str:
    """Damage all weights, send a request, and mend them. Raises RuntimeError if the answer is no text."""
    with _ONE_AT_A_TIME:
        files = _weights(frontend.bundle)
        contents = [file.read_bytes() for file in files]
        try:
            for file, content in zip(files, contents, strict=True):
                file.write_bytes(damage(content))
            answer = frontend.send(_FIELDS)
        finally:
            for file, content in zip(files, contents, strict=True):
                file.write_bytes(content)
    if answer != "length":
        raise RuntimeError(f"with damaged weights: {answer}")
    return answer


def _without_threads(frontend: Frontend) -> str:
    """Refuse the next three threads of the runtime while requests that need threads come, then send one more."""
    fields = {**_FIELDS, "structured_outputs": {"json": {"type": "string"}, "validate_output": True}}
    with _ONE_AT_A_TIME:
        faults = Faults()
        faults.refuse_threads(3)
        with faulty_threads([faults]):
            answers = [frontend.send(fields | {"seed": seed}) for seed in range(4)]
        last = frontend.send(_FIELDS)
    if last != "length":
        raise RuntimeError(f"after {answers}: {last}")
    return f"{last}; {faults.thread_refusals} threads refused"


def _opened(make_manifest: Callable[[Path], Any]) -> str:
    with tempfile.TemporaryDirectory() as folder:
        make_manifest(Path(folder, FILE_NAME))
        try:
            LLM(folder)
        except TandemError as error:
            return refused(str(error))
    raise RuntimeError(f"a bundle whose {FILE_NAME} is no regular file was opened")


def _second_model(bundle: Path) -> str:
    """Truncate the weights of a second model of this process while it is open, and compare its texts."""
    with copied(bundle) as folder, LLM(folder, threads=1) as llm:
        params = dict(_FIELDS)
        prompt = params.pop("prompt")
        before = llm.generate(prompt, SamplingParams(**params))
        for file in _weights(folder):
            os.truncate(file, 100)
        after = llm.generate(prompt, SamplingParams(**params))
    if after.token_ids != before.token_ids:
        raise RuntimeError(f"the text of a truncated model changed: {json.dumps([before.text, after.text])}")
    return str(after.finish_reason)


def _weights(bundle: Path) -> list[Path]:
    return [bundle / name for name in Bundle.read(bundle).manifest.files if holds_weights(name)]
