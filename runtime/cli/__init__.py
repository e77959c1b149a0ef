"""The commands around a bundle that exists."""
