// Matmuls with weights of GGUF's types K. Q6_K is stored in 8 bits.
#include "k_quants.cuh"
#include "low_bit_kernels.cuh"

IF_BF16(KERNELS(q4_k_bf16, KQuants<Bf16, 4>) KERNELS(q6_k_bf16, KQuants<Bf16, 8>))
IF_FP16(KERNELS(q4_k_fp16, KQuants<Fp16, 4>) KERNELS(q6_k_fp16, KQuants<Fp16, 8>))
