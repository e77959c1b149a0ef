"""A soak test: random requests, cancellations, floods and faults; each answer must equal that of the request alone."""
