"""Run graphs with onnxruntime, and decoders in steps with onnxruntime and the kernels."""
