// Experts with weights of 4-bit floats.
#include "experts_kept_low_bit.cuh"
#include "float4.cuh"

#define ALL_KERNELS(NAME, ...) KERNELS(NAME, __VA_ARGS__) KEPT_KERNELS(NAME, __VA_ARGS__)
#define BY_GROUP(NAME, T) ALL_KERNELS(by16_##NAME, Float4<T, 0>) ALL_KERNELS(by32_##NAME, Float4<T, 1>)

IF_BF16(BY_GROUP(bf16, Bf16))
IF_FP16(BY_GROUP(fp16, Fp16))
