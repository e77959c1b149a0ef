"""Traces: where each token of a text came from, as a page to look at and as a timeline for Perfetto."""
