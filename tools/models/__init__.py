"""Random models, drafts and tokenizers for benchmarks and tests."""
