"""TensorRT and TensorRT-RTX: their Python modules, and the operators of ``verify.onnx`` as ahead-of-time plugins.

An engine contains the kernels of its plugins. Call ``register.register(plugins)`` before TensorRT parses a graph.
"""
