"""Graph passes: in-memory rewrites of a graph before it is saved, and the cut of a graph into subgraphs."""
