"""Work in other threads and in other programs."""
