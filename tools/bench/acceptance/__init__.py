"""Measure which drafts are accepted, and the time they save: see ``__main__``."""
