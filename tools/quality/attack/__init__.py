"""Latency of one client's stream while other clients send hostile requests: see ``__main__``."""
