"""Compare TandemRT on a CPU with onnxruntime-genai, OpenVINO GenAI, llama.cpp and transformers: see ``__main__``."""
