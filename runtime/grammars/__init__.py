"""Structured outputs: compile a schema, regular expression, grammar or structural tag, and mask tokens with it."""
