"""Tiny models of every supported model family, checked from checkpoint to text."""
