// Matmuls with weights of 8-bit integers.
#include "int8.cuh"
#include "low_bit_kernels.cuh"

IF_BF16(KERNELS(bf16, Int8<Bf16>))
IF_FP16(KERNELS(fp16, Int8<Fp16>))
