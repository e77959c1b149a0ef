// Experts with weights of 4-bit integers, with zero points and without.
#include "experts_low_bit.cuh"
#include "int4.cuh"

IF_BF16(KERNELS(bf16, Int4<Bf16, false>) KERNELS(zeros_bf16, Int4<Bf16, true>))
IF_FP16(KERNELS(fp16, Int4<Fp16, false>) KERNELS(zeros_fp16, Int4<Fp16, true>))
