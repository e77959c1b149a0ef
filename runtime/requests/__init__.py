"""Requests: their state from admission to the end, their text, and their place in the queue and in slots."""
