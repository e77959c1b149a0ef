"""A real model: SmolLM2-135M-Instruct, from a Python package."""
