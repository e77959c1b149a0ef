// Matmuls with weights of 4-bit floats.
#include "float4.cuh"
#include "low_bit_kernels.cuh"

IF_BF16(KERNELS(bf16, Float4<Bf16>))
IF_FP16(KERNELS(fp16, Float4<Fp16>))
