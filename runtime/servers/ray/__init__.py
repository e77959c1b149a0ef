"""Serve bundles with replicas of Ray Serve. Imports ray, the extra ``ray``."""
