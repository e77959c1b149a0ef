"""Chrome trace of a recorder, for Perfetto: the host's steps and the rounds of every request."""

from typing import Any

from tokenizers import Tokenizer

from tandemrt.runtime.trace.data import page_data
from tandemrt.runtime.trace.recorder import Recorder

_HOST, _REQUESTS = 1, 2  # process ids


def chrome_trace(recorder: Recorder, tokenizer: Tokenizer, bundle: str) -> dict[str, Any]:
    """Return the JSON object of a Chrome trace. Times are in microseconds since the first step."""
    steps = recorder.steps()
    begin = steps[0].start if steps else 0.0
    events = [_name(_HOST, "process_name", "host"), _name(_HOST, "thread_name", "rounds")]
    for step in steps:
        for span in step.spans:
            events.append(_complete(span.phase, 1e6 * (span.start - begin), 1e6 * (span.end - span.start), _HOST, 0))
            events[-1]["args"] = {"step": step.number}
    events.append(_name(_REQUESTS, "process_name", f"requests of {bundle}"))
    for number, request in enumerate(page_data(recorder, tokenizer, bundle)["requests"]):
        events.append(_name(_REQUESTS, "thread_name", f"request {number}", thread=number))
        for each in request["rounds"]:
            if each["start"] is None:
                continue
            name = f"{each['kept']} tokens, {each['accepted']} of {len(each['drafted'])} drafts"
            events.append(_complete(name, 1e3 * each["start"], 1e3 * each["ms"], _REQUESTS, number))
            events[-1]["args"] = {key: each[key] for key in ("step", "passed", "accepted", "kept")} | {
                "drafted": [token["text"] for token in each["drafted"]],
                "allowed": each["allowed"],
            }
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _complete(name: str, start: float, duration: float, process: int, thread: int) -> dict[str, Any]:
    return {"name": name, "ph": "X", "ts": start, "dur": duration, "pid": process, "tid": thread, "cat": "round"}


def _name(process: int, kind: str, name: str, thread: int = 0) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": process, "tid": thread, "args": {"name": name}}
