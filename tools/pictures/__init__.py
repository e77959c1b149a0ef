"""The pictures of the docs, drawn from what was measured."""
