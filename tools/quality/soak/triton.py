"""Send the same requests to a Triton server over HTTP, streamed or not; some clients hang up."""

import http.client
import json
import re
import time
import urllib.request
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tools.clients.triton import TritonClient, TritonResponse
from tools.quality.soak.concurrent import CLIENTS
from tools.quality.soak.counters import Rules
from tools.quality.soak.plans import Attempt, Plan
from tools.quality.soak.reference import Reference

_FINISHED = "tandemrt_finished_total"
METRICS_DELAY_S = 30.0  # the server publishes its metrics a few times a second; they must be right by then


class TritonDriver:
    """Sends waves to a server and checks them. ``reference`` must be of the server's bundle.

    Under the rejection rule texts depend on drafts.
    """

    def __init__(self, client: TritonClient, plans: Sequence[Plan], reference: Reference) -> None:
        self._client, self._plans, self._reference = client, plans, reference

    def wave(self, attempts: Sequence[Attempt]) -> list[str]:
        """Send ``attempts``, whose reference outputs exist. Returns one line for each problem."""
        before = self._metrics()
        with ThreadPoolExecutor(CLIENTS) as pool:
            answers = list(pool.map(self._attempt, attempts))
        differences, responses, unseen = [], list[TritonResponse](), 0
        for attempt, answer in zip(attempts, answers, strict=True):
            alone = self._reference.output(attempt.plan)
            if isinstance(answer, str):
                differences.append(f"{attempt}: {answer}")
            elif answer is None:
                unseen += len(alone.token_ids)
            else:
                responses.append(answer)
                expected = TritonResponse(alone.text, alone.reasoning, alone.token_ids, alone.finish_reason)
                differences += [f"{attempt}: {answer!r}, alone {expected!r}"] if answer != expected else []
        if not differences:  # the counters of a failed request are not defined
            differences = self._check_metrics(before, responses, len(attempts), unseen)
        return [f"Triton, {line}" for line in differences]

    def _attempt(self, attempt: Attempt) -> "TritonResponse | str | None":
        """Return the response, or an error message; None if the client hung up."""
        fields = _fields(self._plans[attempt.plan])
        try:
            if attempt.cancel_after is not None:
                self._client.hang_up(fields)
                return None
            return self._client.generate(fields, stream=attempt.way == "stream")
        except (OSError, ValueError, http.client.HTTPException) as error:
            return f"{type(error).__name__}: {error}"

    def _check_metrics(
        self, before: Counter[str], responses: Sequence[TritonResponse], requests: int, unseen: int
    ) -> list[str]:
        """Wait until the server's metrics agree with the responses; return the rules that still do not hold."""
        end = time.monotonic() + METRICS_DELAY_S
        while True:
            rules = metrics_rules(before, self._metrics(), responses, requests, unseen)
            wrong = [rule for rule, holds in rules.items() if not holds]
            if not wrong or time.monotonic() > end:
                return [f"its metrics do not hold: {rule}" for rule in wrong]
            time.sleep(0.1)

    def _metrics(self) -> Counter[str]:
        """Return the runtime's published metrics by name; finished requests also by name.reason."""
        url = f"http://127.0.0.1:{self._client.server.metrics}/metrics"
        with urllib.request.urlopen(url, timeout=METRICS_DELAY_S) as answer:
            lines = answer.read().decode().splitlines()
        values: Counter[str] = Counter()
        for line in lines:
            if sample := re.fullmatch(r"(tandemrt_\w+)\{(.*)\} (\S+)", line):
                name, labels, value = sample.groups()
                values[name] += float(value)  # type: ignore[assignment]  # seconds are not integers
                if reason := re.search(r'reason="(\w+)"', labels):
                    values[f"{name}.{reason[1]}"] += int(float(value))
        return values


def metrics_rules(
    before: Counter[str], now: Counter[str], responses: Sequence[TritonResponse], requests: int, unseen: int
) -> Rules:
    """Return the rules for the server's metrics after a wave of ``requests`` requests with ``responses``.

    ``before`` and ``now`` are metrics by name, finished requests also by name.reason. ``unseen`` is the largest number
    of tokens that clients which hung up did not read.
    """
    more = Counter({name: now[name] - before[name] for name in now})
    finished = {name.partition(".")[2]: count for name, count in more.items() if name.startswith(f"{_FINISHED}.")}
    answered = Counter(response.finish_reason for response in responses)
    tokens, kept = sum(len(response.token_ids) for response in responses), more["tandemrt_kept_total"]
    drafted, emitted = more["tandemrt_drafted_total"], more["tandemrt_emitted_total"]
    steps, queued = more["tandemrt_steps_total"], more["tandemrt_queue_seconds_count"]
    return {
        f"finished {finished}, answered {dict(answered)}, {requests - len(responses)} hung up": more[_FINISHED]
        == requests
        and sum(finished.values()) == requests
        and all(finished.get(reason, 0) >= count for reason, count in answered.items()),
        f"every step ({steps}) is in the histogram": more["tandemrt_accepted_per_step_count"] == steps,
        f"no request had two slots ({queued} of {requests})": len(responses) <= queued <= requests,
        f"drafted {drafted} = evaluated + cut": drafted
        == more["tandemrt_evaluated_total"] + more["tandemrt_constraint_rejected_drafts_total"],
        f"emitted {emitted} >= kept {kept}": emitted >= kept,
        f"kept {kept}, answers hold {tokens}, {unseen} more at most": tokens <= kept <= tokens + unseen,
        "no request waits or runs": now["tandemrt_requests_waiting"] == now["tandemrt_requests_running"] == 0,
    }


def _fields(plan: Plan) -> dict[str, Any]:
    # Triton has 32-bit number tensors; sampling_parameters takes any value.
    params = plan.params.model_dump(mode="json", by_alias=True, exclude_defaults=True)
    prompt = plan.prompt
    if isinstance(prompt, str):
        fields: dict[str, Any] = {"text_input": prompt}
    elif isinstance(prompt[0], int):
        fields = {"input_ids": prompt}
    else:
        fields = {"messages": json.dumps(prompt)}
    return {**fields, "sampling_parameters": json.dumps(params)}
