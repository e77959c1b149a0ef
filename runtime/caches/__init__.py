"""Memory for keys and values, and how it is shared out."""
