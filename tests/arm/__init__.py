"""The C kernels on a 64-bit ARM processor, by a cross compiler and an emulator of programs."""
