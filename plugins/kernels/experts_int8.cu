// Experts with weights of 8-bit integers.
#include "experts_low_bit.cuh"
#include "int8.cuh"

IF_BF16(KERNELS(bf16, Int8<Bf16>))
IF_FP16(KERNELS(fp16, Int8<Fp16>))
