"""Read how the weights of a quantized checkpoint are stored, one module per config format."""
