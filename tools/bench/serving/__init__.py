"""Measure servers under load: see ``__main__``."""
