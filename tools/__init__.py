"""Makers and measures: what builds the demo checkpoints and what times the project. Nothing imports from here."""
