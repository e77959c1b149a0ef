"""Rows of the tables that readers, drafts, operators and servers are made from: equal to the recorded."""

import re
from collections.abc import Iterable
from typing import Any

import pytest

from tandemrt.engines.contract.draft_kinds import DRAFT_KINDS
from tandemrt.engines.contract.operators import SCHEMAS
from tandemrt.engines.parameters import server_tensors
from tandemrt.export.quantize.gguf.families import GGUF_FAMILIES
from tandemrt.export.read.families.registry import FAMILIES
from tandemrt.export.read.quantization.config import METHODS
from tandemrt.export.read.quantization.gguf import _SCHEMES as GGUF_SCHEMES
from tandemrt.export.read.quantization.torchao import _SCHEMES as TORCHAO_SCHEMES
from tandemrt.plugins.implementations import IMPLEMENTATIONS
from tandemrt.plugins.operators.tables4 import TABLES
from tandemrt.runtime.grammars.notation import NOTATIONS
from tandemrt.runtime.servers.openai.errors import _STATUSES
from tests.recorded import in_order, require_recorded

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
}


@pytest.mark.parametrize("table", ROWS)
def test_the_rows_of_a_table_are_those_recorded(table: str) -> None:
    require_recorded(f"table/{table}", (re.sub(r" at 0x[0-9a-f]+", "", in_order(str(row))) for row in ROWS[table]))
