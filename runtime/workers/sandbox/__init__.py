"""Worker processes for tasks that may hang or use much memory, and can be killed."""
