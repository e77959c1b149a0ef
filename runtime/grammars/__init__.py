"""Structured outputs: from a schema, an expression or a grammar to what masks tokens."""
