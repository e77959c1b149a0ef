// The kernels of window_attention, over a cache of one type; attention.cu and attention_float8.cu select the type.
//
// Windows: attend_<dtype>_<D>_<rows>, 128 threads, grid (splits * row tiles, kv_heads, batch); attend_fixed_<…> for
// batch invariance, with 256 threads for heads of 256 values; attend_few_<…> for the same with at most 16 rows of a KV
// head in all, of which blocks that share keys are a cluster where there are clusters. With `append` it writes
// the new keys and values itself, which requires that all rows of a KV head are one tile. Otherwise append_<dtype>_<D>
// runs before. The splits of a tile may be launched as a cluster. A multiprocessor has room for 256 threads.
//
// Prompt runs: prepare_<dtype>_<D>, which multiplies queries by `scale`, then attend_runs_<dtype>_<D> with the prepared
// queries in place of qkv, in tiles of 64 rows, grid (splits * row tiles, kv_heads).
#pragma once

#include "attention_fixed.cuh"
#include "attention_plain.cuh"
#include "attention_prompts.cuh"
#include "attention_wide.cuh"
#include "early.cuh"

#define INPUTS(T)                                                                                                \
    const T::Element *qkv, const T::Cached *, const T::Cached *, const int *block_table, const i64 *write_index, \
        const T::Element *cosine, const T::Element *sine, const T::Element *q_norm, const T::Element *k_norm,    \
        const float *sinks
#define SIZES                                                                                              \
    int query, int heads, int kv_heads, int block_size, int max_blocks, int sliding_window, int new_heads, \
        int value_norm
#define FLOATS float scale, float epsilon, float key_scale, float value_scale
#define OPERANDS(T)                                                                                                    \
    (Operands<T>{qkv,       key_cache,  value_cache, block_table, write_index, cosine,     sine,       q_norm,         \
                 k_norm,    sinks,      query,       heads,       kv_heads,    block_size, max_blocks, sliding_window, \
                 new_heads, value_norm, scale,       epsilon,     key_scale,   value_scale})

#define APPEND(NAME, T, D)                                                                            \
    extern "C" __global__ void __launch_bounds__(128)                                                 \
        append_##NAME##_##D(INPUTS(T), SIZES, FLOATS, T::Cached* key_cache, T::Cached* value_cache) { \
        append_all<T, D>(OPERANDS(T));                                                                \
    }
#define ATTEND(NAME, T, D, ROWS) ATTEND_BY(attend_##NAME##_##D##_##ROWS, WARPS, T, D, ROWS, attend_windows)
#define ATTEND_FIXED(NAME, T, D, ROWS) \
    ATTEND_BY(attend_fixed_##NAME##_##D##_##ROWS, FIXED_WARPS<D>, T, D, ROWS, attend_windows_fixed)
#define ATTEND_FEW(NAME, T, D, ROWS) \
    ATTEND_BY(attend_few_##NAME##_##D##_##ROWS, FIXED_WARPS<D>, T, D, ROWS, attend_few_fixed)
// Heads of 64 values have too little work for several warps; of other sizes they were not measured.
#define FIXED_32(NAME, T) FIXED_ROWS(NAME, T, 32)
#define FIXED_64(NAME, T) FIXED_ROWS(NAME, T, 64)
#define FIXED_128(NAME, T)         \
    ATTEND_FIXED(NAME, T, 128, 32) \
    ATTEND_FIXED(NAME, T, 128, 64) \
    ATTEND_FEW(NAME, T, 128, 16) ATTEND_FEW(NAME, T, 128, 32) ATTEND_FEW(NAME, T, 128, 64)
#define FIXED_256(NAME, T) FIXED_ROWS(NAME, T, 256)
#define FIXED_ROWS(NAME, T, D) ATTEND_FIXED(NAME, T, D, 16) ATTEND_FIXED(NAME, T, D, 32) ATTEND_FIXED(NAME, T, D, 64)
#define ATTEND_BY(KERNEL, COUNT, T, D, ROWS, ATTEND)                                                      \
    extern "C" __global__ void __launch_bounds__(32 * (COUNT), 2 * WARPS / (COUNT))                       \
        KERNEL(INPUTS(T), SIZES, int splits, int append, FLOATS, T::Element* mixed, T::Cached* key_cache, \
               T::Cached* value_cache, float* sums, float2* bounds, int* tickets) {                       \
        begin_next();                                                                                     \
        ATTEND<T, D, ROWS / 16>(OPERANDS(T), splits, append, mixed, Parts{sums, bounds, tickets});        \
    }
#define ATTEND_PLAINLY(NAME, T, D)                                                                   \
    extern "C" __global__ void __launch_bounds__(128) attend_##NAME##_##D(                           \
        INPUTS(T), SIZES, FLOATS, T::Element* mixed, T::Cached* key_cache, T::Cached* value_cache) { \
        attend_plainly<T, D>(OPERANDS(T), mixed);                                                    \
    }
// For prompt runs: `query` is their number of tokens in total, padding included.
#define RUN_INPUTS(T)                                                                                     \
    const T::Element *qkv, const T::Cached *, const T::Cached *, const int *rows, const int *starts,      \
        const i64 *write_index, const int *block_table, const T::Element *cosine, const T::Element *sine, \
        const T::Element *q_norm, const T::Element *k_norm, const float *sinks
#define PREPARE(NAME, T, D)                                                                                     \
    extern "C" __global__ void __launch_bounds__(128)                                                           \
        prepare_##NAME##_##D(RUN_INPUTS(T), SIZES, int runs, FLOATS, T::Element* queries, T::Cached* key_cache, \
                             T::Cached* value_cache, int* lengths) {                                            \
        write_lengths(starts, write_index, runs, heads * D, T::FLOAT8, sliding_window, lengths);                \
        prepare_all<T, D>(OPERANDS(T), Runs{rows, starts}, lengths, queries);                                   \
    }
#define ATTEND_RUNS(NAME, T, D)                                                                      \
    extern "C" __global__ void __launch_bounds__(128, 2) attend_runs_##NAME##_##D(                   \
        RUN_INPUTS(T), SIZES, int runs, int splits, FLOATS, T::Element* mixed, T::Cached* key_cache, \
        T::Cached* value_cache, float* sums, float2* bounds, int* tickets) {                         \
        attend_all<T, D, 4>(OPERANDS(T), starts, runs, splits, mixed, Parts{sums, bounds, tickets}); \
    }
#define ATTEND_RUNS_PLAINLY(NAME, T, D)                                                                  \
    extern "C" __global__ void __launch_bounds__(128) attend_runs_##NAME##_##D(                          \
        RUN_INPUTS(T), SIZES, FLOATS, T::Element* mixed, T::Cached* key_cache, T::Cached* value_cache) { \
        attend_all_plainly<T, D>(OPERANDS(T), Runs{rows, starts}, mixed);                                \
    }
#define ATTEND_WIDE(NAME, T, D, ROWS)                                                                            \
    extern "C" __global__ void __launch_bounds__(32 * WIDE_WARPS, 1) attend_##NAME##_##D##_##ROWS(               \
        INPUTS(T), SIZES, int splits, int buffers, FLOATS, T::Element* mixed, T::Cached* key_cache,              \
        T::Cached* value_cache, float* sums, float2* bounds, int* tickets) {                                     \
        attend_windows_wide<T, D, ROWS / 16>(OPERANDS(T), splits, buffers, mixed, Parts{sums, bounds, tickets}); \
    }
#define ATTEND_RUNS_WIDE(NAME, T, D, ROWS)                                                                        \
    extern "C" __global__ void __launch_bounds__(32 * WIDE_WARPS, 1)                                              \
        attend_runs_##NAME##_##D##_##ROWS(RUN_INPUTS(T), SIZES, int runs, int buffers, FLOATS, T::Element* mixed, \
                                          T::Cached* key_cache, T::Cached* value_cache) {                         \
        attend_all_wide<T, D, ROWS / 16>(OPERANDS(T), starts, runs, buffers, mixed);                              \
    }
#define TENSOR_CORE(NAME, T, D) \
    APPEND(NAME, T, D)          \
    ATTEND(NAME, T, D, 16)      \
    ATTEND(NAME, T, D, 32) ATTEND(NAME, T, D, 64) FIXED_##D(NAME, T) PREPARE(NAME, T, D) ATTEND_RUNS(NAME, T, D)
#define PLAIN(NAME, T, D) \
    APPEND(NAME, T, D) ATTEND_PLAINLY(NAME, T, D) PREPARE(NAME, T, D) ATTEND_RUNS_PLAINLY(NAME, T, D)
#define WIDE(NAME, T, D)        \
    APPEND(NAME, T, D)          \
    PREPARE(NAME, T, D)         \
    ATTEND_WIDE(NAME, T, D, 16) \
    ATTEND_WIDE(NAME, T, D, 32) ATTEND_RUNS_WIDE(NAME, T, D, 16) ATTEND_RUNS_WIDE(NAME, T, D, 64)
