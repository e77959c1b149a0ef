"""xgrammar's native compiler and matcher, without its public Python package.

``import xgrammar`` imports torch and transformers: 5.3 s of CPU time on a server, 0.4 s without. A bundle on a CPU
runs without either package. So this module loads xgrammar's native library through its private bindings
(``xgrammar.base._core``), when the first EBNF grammar is compiled; constraints.txt pins the tested version.

llguidance cannot replace xgrammar here. EBNF is defined over characters; llguidance splits the text into lexemes and
takes the longest match. A translation with one lexeme per character is exact, but exceeds llguidance's limit of 50,000
parser items in the first JSON string over a vocabulary of 128,000 tokens. Longer lexemes change the language of a
grammar.
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

from tandemrt.engines.validation.errors import BackendUnavailable

_RAW = 0  # the vocabulary type whose tokens are plain bytes
_loading = threading.Lock()


class NativeGrammar:
    """A grammar for one vocabulary. Threads may share it."""

    def __init__(self, handle: Any) -> None:
        self.handle = handle

    @property
    def memory_size_bytes(self) -> int:
        return int(self.handle.memory_size_bytes())


class NativeCompiler:
    """Compile for the vocabulary ``tokens``; ``stop_token_ids`` end a text. Raises RuntimeError."""

    def __init__(self, tokens: Sequence[bytes], stop_token_ids: Sequence[int], *, max_threads: int) -> None:
        library = _library()
        info = library.TokenizerInfo(list(tokens), _RAW, len(tokens), list(stop_token_ids), False)
        self._handle = library.GrammarCompiler(info, max_threads, False, -1)  # cache off, no limit

    def compile_grammar(self, source: str, root: str = "root") -> NativeGrammar:
        """Compile EBNF with the start rule ``root``."""
        try:
            return NativeGrammar(self._handle.compile_grammar_from_strings(source, root))
        except UnicodeDecodeError as error:  # of a message that cites half a character
            raise RuntimeError(error.object.decode(errors="replace")) from None


class NativeMatcher:
    """The state of one text in a grammar. Not thread-safe."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    @classmethod
    def of(cls, compiled: NativeGrammar, stop_token_ids: Sequence[int]) -> "NativeMatcher":
        """Return a matcher of a new text that ``stop_token_ids`` end."""
        return cls(_library().GrammarMatcher(compiled.handle, list(stop_token_ids), False, -1, None))

    def accept_token(self, token: int) -> bool:
        return bool(self._handle.accept_token(token, False))

    def fill_next_token_bitmask(self, row: np.ndarray) -> None:
        """Write an int32[words] row; it must be contiguous."""
        self._handle.fill_next_token_bitmask(row, 0, False)

    def find_jump_forward_bytes(self) -> bytes:
        """Return the bytes that must come next. They may end, or begin, inside a character."""
        try:
            return str(self._handle.find_jump_forward_string()).encode()
        except UnicodeDecodeError as error:  # the binding decodes the bytes as a complete text
            return bytes(error.object)

    def rollback(self, count: int) -> None:
        self._handle.rollback(count)

    def fork(self) -> "NativeMatcher":
        return NativeMatcher(self._handle.fork())

    def is_terminated(self) -> bool:
        return bool(self._handle.is_terminated())


@cache
def is_installed() -> bool:
    """Whether xgrammar is installed. This does not load it."""
    with _loading:  # while it is loaded, the module's place has a package without a spec
        return "xgrammar" in sys.modules or importlib.util.find_spec("xgrammar") is not None


@cache
def _library() -> Any:
    """Return the native module of xgrammar. Raises BackendUnavailable if it cannot be loaded."""
    with _loading:
        if "xgrammar" in sys.modules:
            from xgrammar.base import _core

            return _core
        spec = importlib.util.find_spec("xgrammar")
        assert spec is not None  # choose_engine has checked it
        # A temporary empty package "xgrammar" makes its submodules importable without its __init__. A later
        # `import xgrammar` loads the real package. torch is hidden, because the bindings import it if they can.
        package = ModuleType("xgrammar")
        package.__path__ = list(spec.submodule_search_locations or ())
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
    """An import finder that hides the module ``name`` from this thread, unless it is imported already."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._thread = threading.get_ident()

    def find_spec(self, name: str, _path: Any = None, _target: Any = None) -> ModuleSpec | None:
        """Raise ModuleNotFoundError for the hidden module; return None for any other."""
        if name == self._name and threading.get_ident() == self._thread:
            raise ModuleNotFoundError(f"{name} is hidden while xgrammar's bindings load", name=name)
        return None
