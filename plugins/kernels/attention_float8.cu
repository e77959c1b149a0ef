// float8_window_attention: window_attention over a float8 cache. For prompt runs that cuDNN attends, widen_<dtype>_<D>
// converts the cache blocks that they see, after prepare_<dtype>_<D>.
#include "attention_kernels.cuh"
#include "variants.cuh"

#define WIDEN(NAME, T, D)                                                                                            \
    extern "C" __global__ void __launch_bounds__(128)                                                                \
        widen_##NAME##_##D(RUN_INPUTS(T), SIZES, FLOATS, T::Element* keys, T::Element* values, T::Cached* key_cache, \
                           T::Cached* value_cache) {                                                                 \
        widen_all<T, D>(OPERANDS(T), starts, keys, values);                                                          \
    }
#define BOTH(NAME, T, D) TENSOR_CORE(NAME, T, D) WIDEN(NAME, T, D)

IF_BF16(FOR_HEAD_DIMS(BOTH, bf16, InFloat8<Bf16>))
IF_FP16(FOR_HEAD_DIMS(BOTH, fp16, InFloat8<Fp16>))
IF_FP32(FOR_HEAD_DIMS(PLAIN, fp32, InFloat8<Fp32>))
