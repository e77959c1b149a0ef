// Experts with weights of 4-bit floats.
#include "experts_low_bit.cuh"
#include "float4.cuh"

IF_BF16(KERNELS(bf16, Float4<Bf16>))
IF_FP16(KERNELS(fp16, Float4<Fp16>))
