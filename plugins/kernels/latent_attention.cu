// latent_attention: attention of new tokens over a paged cache of latent vectors, which receives theirs.
//
// append_latent_<dtype>, 128 threads, grid (ceil(tokens / 4)), writes the new keys. Then attend_latent_<dtype>_<rows>,
// 256 threads, in tiles of `rows` rows: windows in grid (splits * tiles, texts), prompt runs in grid (splits * tiles).
// With several splits merge_latent_<dtype>, 128 threads, grid (tokens * heads), adds them. In float32
// attend_latent_fp32, 128 threads, grid (ceil(tokens * heads / 4)), attends alone.
#include "latent_block.cuh"
#include "latent_plain.cuh"
#include "variants.cuh"

#define CALL(T)                                                                                                        \
    const T::Element *query, const T::Element *key, T::Element *cache, const int *block_table, const i64 *write_index, \
        const int *rows, const int *starts, const T::Element *cosine, const T::Element *sine, int tokens, int window,  \
        int heads, int block_size, int max_blocks, float scale
#define GIVEN(T)                                                                                                   \
    (LatentCall<T>{query, key, cache, block_table, write_index, rows, starts, cosine, sine, tokens, window, heads, \
                   block_size, max_blocks, scale})

#define APPEND(NAME, T) \
    extern "C" __global__ void __launch_bounds__(128) append_latent_##NAME(CALL(T)) { append_keys<T>(GIVEN(T)); }
#define ATTEND(NAME, T, ROWS, AT_ONCE)                                                               \
    extern "C" __global__ void __launch_bounds__(256, AT_ONCE) attend_latent_##NAME##_##ROWS(        \
        CALL(T), int runs, int splits, int stages, T::Element* mixed, float* sums, float2* bounds) { \
        attend<T, ROWS / 16>(GIVEN(T), runs, splits, stages, mixed, LatentParts{sums, bounds});      \
    }
#define MERGE(NAME, T)                                                                             \
    extern "C" __global__ void __launch_bounds__(128)                                              \
        merge_latent_##NAME(CALL(T), int splits, T::Element* mixed, float* sums, float2* bounds) { \
        merge_splits<T>(GIVEN(T), splits, mixed, LatentParts{sums, bounds});                       \
    }
#define TENSOR_CORE(NAME, T) \
    APPEND(NAME, T) ATTEND(NAME, T, 16, 2) ATTEND(NAME, T, 32, 1) ATTEND(NAME, T, 64, 1) MERGE(NAME, T)

IF_BF16(TENSOR_CORE(bf16, Bf16))
IF_FP16(TENSOR_CORE(fp16, Fp16))
IF_FP32(APPEND(fp32, Fp32) extern "C" __global__ void __launch_bounds__(128)
            attend_latent_fp32(CALL(Fp32), float* mixed) { attend_plainly(GIVEN(Fp32), mixed); })
