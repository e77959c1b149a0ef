"""One process per engine, each in an environment that has that engine."""
