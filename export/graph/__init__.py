"""Tools to build graphs: the graph builder, weights of a checkpoint, and lowerings."""
