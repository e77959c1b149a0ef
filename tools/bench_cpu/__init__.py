"""TandemRT on a CPU beside onnxruntime-genai, OpenVINO GenAI, llama.cpp and transformers: see ``__main__``."""
