"""What is done to a graph in memory before it is saved."""
