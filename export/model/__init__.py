"""From what was read to graphs in memory."""
