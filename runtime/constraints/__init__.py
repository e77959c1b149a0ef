"""Constraints: one object per request that decides which tokens are allowed and writes them as mask rows."""
