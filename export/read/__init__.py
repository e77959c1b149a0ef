"""From a folder of the hub to what the exporter knows of it: config, weights, tokenizer."""
