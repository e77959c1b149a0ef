"""A soak: random requests, leaving, floods and faults, each answer held against the same request alone."""
