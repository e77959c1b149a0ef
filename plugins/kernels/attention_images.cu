// Prompt runs of window_attention whose tokens see all of the image that they belong to: attend_images_<dtype>_<D> in
// place of attend_runs_<dtype>_<D>, with the position after the image of each token in `ends`, or 0.
#include "attention_kernels.cuh"
#include "variants.cuh"

#define IMAGES(NAME, T, D)                                                                                            \
    extern "C" __global__ void __launch_bounds__(128, 2) attend_images_##NAME##_##D(                                  \
        RUN_INPUTS(T), const i64* ends, SIZES, int runs, int splits, FLOATS, T::Element* mixed, T::Cached* key_cache, \
        T::Cached* value_cache, float* sums, float2* bounds, int* tickets) {                                          \
        Parts parts{sums, bounds, tickets};                                                                           \
        attend_all<T, D, 4>(OPERANDS(T), starts, runs, splits, mixed, parts, WithinImages{ends, query});              \
    }
#define IMAGES_PLAINLY(NAME, T, D)                                                                   \
    extern "C" __global__ void __launch_bounds__(128)                                                \
        attend_images_##NAME##_##D(RUN_INPUTS(T), const i64* ends, SIZES, FLOATS, T::Element* mixed, \
                                   T::Cached* key_cache, T::Cached* value_cache) {                   \
        attend_all_plainly<T, D>(OPERANDS(T), Runs{rows, starts}, mixed, WithinImages{ends, query}); \
    }

IF_BF16(FOR_HEAD_DIMS(IMAGES, bf16, AsComputed<Bf16>))
IF_FP16(FOR_HEAD_DIMS(IMAGES, fp16, AsComputed<Fp16>))
IF_FP32(FOR_HEAD_DIMS(IMAGES_PLAINLY, fp32, AsComputed<Fp32>) IF_HEAD_512(IMAGES_PLAINLY(fp32, AsComputed<Fp32>, 512)))
