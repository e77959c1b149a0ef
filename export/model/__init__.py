"""Build the ONNX graphs of targets, draft models and draft heads in memory."""
