"""A trained model, SmolLM2-135M-Instruct, from a Python package."""
