"""Tiny models of every family of models, and a check of them from a checkpoint to texts."""
