"""Traces: the origin of every token of a text, as an HTML page or as a timeline for Perfetto."""
