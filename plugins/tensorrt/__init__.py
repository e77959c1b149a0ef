"""The operators of ``verify.onnx`` as ahead-of-time TensorRT plugins: an engine contains their kernels.

Call ``register.register(plugins)`` before TensorRT parses a graph.
"""
