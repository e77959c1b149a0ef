"""Rows of the tables that readers, drafts, operators and servers are made from: equal to the recorded."""

import re
from collections.abc import Iterable
from typing import Any

import pytest
import typer

from tandemrt.engines.contract.draft_kinds import DRAFT_KINDS
from tandemrt.engines.contract.operators import SCHEMAS
from tandemrt.engines.parameters import server_tensors
from tandemrt.engines.recipe import backends, models
from tandemrt.engines.validation.records import Section
from tandemrt.export.compile.tensorrt import summary
from tandemrt.export.quantize.gguf.families import GGUF_FAMILIES
from tandemrt.export.read import unused_fields
from tandemrt.export.read.families.registry import FAMILIES
from tandemrt.export.read.quantization.config import METHODS
from tandemrt.export.read.quantization.gguf import _SCHEMES as GGUF_SCHEMES
from tandemrt.export.read.quantization.torchao import _SCHEMES as TORCHAO_SCHEMES
from tandemrt.export.read.vision import kinds
from tandemrt.plugins.implementations import IMPLEMENTATIONS
from tandemrt.plugins.operators.tables4 import TABLES
from tandemrt.runtime.cli import serve_ray
from tandemrt.runtime.grammars.notation import NOTATIONS
from tandemrt.runtime.metrics import names
from tandemrt.runtime.metrics.metrics import Metrics
from tandemrt.runtime.servers.openai.errors import _STATUSES
from tandemrt.runtime.servers.openai.protocols import ENDPOINTS
from tests.command_line import app
from tests.recorded import in_order, require_recorded

METRICS = Metrics(
    rounds=2, drafted=9, emitted=7, kept=6, steps=3, accepted=[3, 1], finished={"stop": 2}, eager_runs={"prefill": 1}
)
METRICS.queue_seconds.observe(0.004, 3)
METRICS.output_tokens.observe(20)
REPORT: dict[str, Any] = {
    "compiler": "c", "built_for": "b", "native": {"attention": 2, "norm": 0}, "network_layers": {"a": 2, "b": 3},
    "engine_layers": ["x", "y"], "engine_not_opened": None,
    "profiles": {"decode": {"memory_bytes": 3_000_000,
                            "inputs": {"ids": [[1, 4, 4], [1, 2, 9]], "past_0": [[1, 1, 1]]}},
                 "prefill": {"memory_bytes": None, "inputs": {"ids": [[1, 1, 1], [0, 8, 8]]}}},
}  # fmt: skip


def options() -> Iterable[tuple[Any, ...]]:
    """Each option of each command, with its bounds and default."""
    for name, command in typer.main.get_command(app).commands.items():  # type: ignore[attr-defined]
        for each in getattr(command, "commands", {name: command}).values():
            for option in each.params:
                yield name, each.name, option.name, option.opts, option.min, option.max, option.default


ROWS: dict[str, Iterable[Any]] = {
    "families": {row.name: row for row in FAMILIES.values()}.values(),
    "families of gguf": GGUF_FAMILIES.items(),
    "formats of quantization": METHODS,
    "schemes": [*GGUF_SCHEMES.items(), *TORCHAO_SCHEMES.items()],
    "tables of values": ((name, table.tolist()) for name, table in TABLES.items()),
    "kinds of drafts": DRAFT_KINDS.items(),
    "schemas of operators": SCHEMAS.items(),
    "implementations": IMPLEMENTATIONS.items(),
    "tensors of servers": [*server_tensors.inputs(), *server_tensors.OUTPUTS, *server_tensors.OFF.items()],
    "notations": NOTATIONS.items(),
    "errors of servers": _STATUSES.items(),
    "fields without effect": [*unused_fields.UNUSED_FIELDS.items(), *unused_fields.NO_EFFECT_VALUES.items()],
    "towers": ((name, each) for name, each in vars(kinds).items() if isinstance(each, kinds.TowerKind)),
    "options of commands": options(),
    "options without effect with Ray": serve_ray.UNSUPPORTED,
    "sections of recipes": (
        (row.__name__, {name: (field.default, field.metadata) for name, field in row.model_fields.items()})
        for module in (backends, models)
        for row in vars(module).values()
        if isinstance(row, type) and issubclass(row, Section)
    ),
    "counters": [*names.counters(METRICS), *names.vllm_counters(METRICS)],
    "histograms": (
        (name, each.buckets, each.counts)
        for name, each in (*names.histograms(METRICS), *names.vllm_histograms(METRICS))
    ),
    "endpoints": ENDPOINTS.items(),
    "inspected engines": [summary._rows(REPORT), summary._rows({**REPORT, "engine_layers": None, "native": {}})],
}


@pytest.mark.parametrize("table", ROWS)
def test_the_rows_of_a_table_are_those_recorded(table: str) -> None:
    require_recorded(f"table/{table}", (re.sub(r" at 0x[0-9a-f]+", "", in_order(str(row))) for row in ROWS[table]))
