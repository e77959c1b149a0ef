"""Anthropic's messages, served by the OpenAI server: the forms of its requests, answers and errors."""
