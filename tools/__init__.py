"""Tools of the repository: builders of checkpoints, benchmarks and load tests. The project imports none of them."""
