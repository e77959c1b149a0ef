"""Compile graphs for onnxruntime, which runs graph files."""
