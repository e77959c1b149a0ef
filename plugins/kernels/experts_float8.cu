// Experts with weights of 8-bit floats.
#include "experts_kept_low_bit.cuh"
#include "float8_numbers.cuh"

IF_BF16(KERNELS(bf16, Float8<Bf16>) KEPT_KERNELS(bf16, Float8<Bf16>))
IF_FP16(KERNELS(fp16, Float8<Fp16>) KEPT_KERNELS(fp16, Float8<Fp16>))
