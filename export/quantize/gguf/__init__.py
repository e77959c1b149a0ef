"""Convert GGUF, the file format of llama.cpp, to a checkpoint folder."""
