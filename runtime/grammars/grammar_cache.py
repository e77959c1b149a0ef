"""A bounded cache of compiled grammars."""

import threading
from collections import OrderedDict
from typing import Any

from tandemrt.runtime.grammars.compiler import CompiledGrammar


class GrammarCache:
    """An LRU cache of compiled grammars, bounded in bytes. Libraries of several vocabularies may share it."""

    def __init__(self, limit_bytes: int = 256 << 20) -> None:
        self._limit = limit_bytes
        self._entries: OrderedDict[tuple[Any, ...], tuple[CompiledGrammar, int]] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: tuple[Any, ...]) -> CompiledGrammar | None:
        """Return the grammar of ``key``, or None. One that is exhausted leaves the cache."""
        with self._lock:
            if key not in self._entries:
                return None
            grammar, size = self._entries[key]
            if grammar.exhausted:
                del self._entries[key]
                self._bytes -= size
                return None
            self._entries.move_to_end(key)
            return grammar

    def put(self, key: tuple[Any, ...], grammar: CompiledGrammar, size: int) -> None:
        """Add ``grammar`` of ``size`` bytes, unless it alone exceeds the limit."""
        with self._lock:
            if key in self._entries or size > self._limit:
                return
            self._entries[key] = grammar, size
            self._bytes += size
            while self._bytes > self._limit:
                _, (_, freed) = self._entries.popitem(last=False)
                self._bytes -= freed
