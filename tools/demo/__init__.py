"""The demo checkpoints: a small extraction task, its tokenizer, a target and a draft, and how they are measured."""

from tools.demo.corpus import SCHEMAS, Example, examples, held_out

__all__ = ["SCHEMAS", "Example", "examples", "held_out"]
