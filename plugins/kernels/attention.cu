// window_attention: attention of new tokens over a paged cache, which receives their keys and values. The cache has the
// compute dtype.
#include "attention_kernels.cuh"
#include "variants.cuh"

IF_BF16(FOR_HEAD_DIMS(TENSOR_CORE, bf16, AsComputed<Bf16>) IF_HEAD_512(WIDE(bf16, AsComputed<Bf16>, 512)))
IF_FP16(FOR_HEAD_DIMS(TENSOR_CORE, fp16, AsComputed<Fp16>) IF_HEAD_512(WIDE(fp16, AsComputed<Fp16>, 512)))
IF_FP32(FOR_HEAD_DIMS(PLAIN, fp32, AsComputed<Fp32>) IF_HEAD_512(PLAIN(fp32, AsComputed<Fp32>, 512)))
