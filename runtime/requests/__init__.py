"""Requests, from what a caller asks to what comes back."""
