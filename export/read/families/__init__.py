"""The supported model families, one row each."""
