"""The OpenAI API: requests parsed into sampling parameters and prompts, outputs formatted as answers."""
