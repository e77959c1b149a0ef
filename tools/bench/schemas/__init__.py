"""Measure published JSON schemas: how many are admitted, soundness, and cost."""
