"""Work that may take long or much memory, in processes that can be killed; what hangs there holds nobody here."""
