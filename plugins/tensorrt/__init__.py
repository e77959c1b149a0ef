"""The operators of ``verify.onnx`` as TensorRT plugins, compiled ahead of time: an engine carries their kernels.

Call ``register.register()`` before TensorRT parses a graph.
"""
