"""One process per engine, each in an environment with that engine."""
