// Matmuls with weights of 4-bit floats.
#include "float4.cuh"
#include "low_bit_kernels.cuh"

IF_BF16(KERNELS(by16_bf16, Float4<Bf16, 0>) KERNELS(by32_bf16, Float4<Bf16, 1>))
IF_FP16(KERNELS(by16_fp16, Float4<Fp16, 0>) KERNELS(by32_fp16, Float4<Fp16, 1>))
