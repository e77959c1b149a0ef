"""The demo checkpoints: a small extraction task, its tokenizer, target and draft, and their evaluation."""

from tools.demo.corpus import SCHEMAS, Example, examples, held_out

__all__ = ["SCHEMAS", "Example", "examples", "held_out"]
