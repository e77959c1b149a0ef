"""Read a Hugging Face checkpoint folder: config, tensor directory, quantization, tokenizer."""
