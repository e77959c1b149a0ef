// float8_window_attention: window_attention over a cache in float8.
#include "attention_kernels.cuh"
#include "variants.cuh"

IF_BF16(FOR_HEAD_DIMS(TENSOR_CORE, bf16, InFloat8<Bf16>))
IF_FP16(FOR_HEAD_DIMS(TENSOR_CORE, fp16, InFloat8<Fp16>))
IF_FP32(FOR_HEAD_DIMS(PLAIN, fp32, InFloat8<Fp32>))
