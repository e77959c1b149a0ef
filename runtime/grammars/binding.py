"""xgrammar's compiler and matcher without its Python package, which imports torch and transformers for seconds.

What is loaded is its library, by the bindings that its package has for it, when the first grammar is compiled.
"""

import importlib.util
import sys
import threading
from collections.abc import Sequence
from functools import cache
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import numpy as np

from tandemrt.engines.errors import BackendUnavailable

_RAW = 0  # tokens are given as the bytes they spell
_loading = threading.Lock()


class CompiledGrammar:
    """A grammar for one vocabulary. Threads may share it."""

    def __init__(self, handle: Any) -> None:
        self.handle = handle

    @property
    def memory_size_bytes(self) -> int:
        return int(self.handle.memory_size_bytes())


class GrammarCompiler:
    """Compiles for the vocabulary ``tokens``, of which ``stop_token_ids`` end a text. Raises RuntimeError."""

    def __init__(self, tokens: Sequence[bytes], stop_token_ids: Sequence[int], *, max_threads: int) -> None:
        library = _library()
        info = library.TokenizerInfo(list(tokens), _RAW, len(tokens), list(stop_token_ids), False)
        self._handle = library.GrammarCompiler(info, max_threads, False, -1)  # no cache, no limit to it

    def compile_grammar(self, source: str, root: str = "root") -> CompiledGrammar:
        """From EBNF, whose texts are those of the rule ``root``."""
        return CompiledGrammar(self._handle.compile_grammar_from_strings(source, root))


class GrammarMatcher:
    """Where one text stands in a grammar. Not for two threads at once."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    @classmethod
    def of(cls, compiled: CompiledGrammar, stop_token_ids: Sequence[int]) -> "GrammarMatcher":
        """At the beginning of a text that ``stop_token_ids`` end."""
        return cls(_library().GrammarMatcher(compiled.handle, list(stop_token_ids), False, -1, None))

    def accept_token(self, token: int) -> bool:
        return bool(self._handle.accept_token(token, False))

    def fill_next_token_bitmask(self, row: np.ndarray) -> None:
        """Write int32[words]; the array must be contiguous."""
        self._handle.fill_next_token_bitmask(row, 0, False)

    def find_jump_forward_string(self) -> str:
        """What the text must go on with."""
        return str(self._handle.find_jump_forward_string())

    def rollback(self, count: int) -> None:
        self._handle.rollback(count)

    def fork(self) -> "GrammarMatcher":
        return GrammarMatcher(self._handle.fork())

    def is_terminated(self) -> bool:
        return bool(self._handle.is_terminated())


@cache
def _library() -> Any:
    """The classes of xgrammar's library. Raises BackendUnavailable if it cannot be loaded."""
    with _loading:
        if "xgrammar" in sys.modules:
            from xgrammar.base import _core

            return _core
        spec = importlib.util.find_spec("xgrammar")
        if spec is None or spec.submodule_search_locations is None:
            raise BackendUnavailable("xgrammar is not installed; grammars need it: pip install 'xgrammar>=0.2.8'")
        # Its modules are found in a package of the same name that imports nothing; who imports xgrammar later gets
        # the whole one, with these modules in it. Its bindings import torch where there is one, and need none.
        package = ModuleType("xgrammar")
        package.__path__ = list(spec.submodule_search_locations)
        sys.modules["xgrammar"] = package
        without = _Without("torch")
        sys.meta_path.insert(0, without)
        try:
            import xgrammar.load_binding  # noqa: F401  # registers the library's classes
            from xgrammar.base import _core

            return _core
        except (ImportError, OSError) as error:
            raise BackendUnavailable(f"xgrammar cannot be loaded: {error}; install xgrammar 0.2.8 again") from error
        finally:
            sys.meta_path.remove(without)
            if sys.modules.get("xgrammar") is package:
                del sys.modules["xgrammar"]


class _Without:
    """Lets this thread import anything but ``name``, if it is not there already."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._thread = threading.get_ident()

    def find_spec(self, name: str, _path: Any = None, _target: Any = None) -> ModuleSpec | None:
        """As importlib asks its finders."""
        if name == self._name and threading.get_ident() == self._thread:
            raise ModuleNotFoundError(f"{name} is not imported here", name=name)
        return None
