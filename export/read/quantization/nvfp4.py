"""NVFP4: floats of 4 bits; 16 share a float8_e4m3fn scale, and all of a tensor one more scale in float32."""

GROUP_SIZE = 16  # values per scale, fixed by the format
