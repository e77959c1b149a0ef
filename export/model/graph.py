"""A graph to build, and where it lies in the bundle."""

from collections.abc import Callable
from dataclasses import dataclass

import onnx_ir as ir

from tandemrt.engines.contract import Contract
from tandemrt.engines.manifest import EngineName


@dataclass(frozen=True)
class Graph:
    """One graph to build: ``file`` is its path in the bundle, ``make`` builds it."""

    name: EngineName
    file: str
    dtype: str
    contract: Contract
    make: Callable[[], ir.Model]
