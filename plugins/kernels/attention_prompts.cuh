// Prompt runs: a kernel prepares their tokens, then each run attends like a long window of one row.
#pragma once

#include "attention_block.cuh"
#include "run_tiles.cuh"

// Layout of the prompt runs among their tokens. In Operands, block_table and write_index are those of the runs, qkv
// begins with the first prompt token, and query is their number.
struct Runs {
    const int* rows;    // [query]: run of each token; negative: padding
    const int* starts;  // [runs + 1]

    // Position in its text of a token of `run`.
    template <class T>
    __device__ i64 position(const Operands<T>& x, int run, int token) const {
        return x.write_index[run] + token - starts[run];
    }
};

constexpr int CUDNN_KEYS = 128;  // keys per tile: a tile's masked values are multiplied by 0, so none may be NaN

// The first converted position of a run: the tile of the first position that its first token sees.
__device__ inline int begin_widened(const i64* index, int run, int sliding_window) {
    int first = sliding_window ? static_cast<int>(index[run]) - sliding_window + 1 : 0;
    return max(first, 0) / CUDNN_KEYS * CUDNN_KEYS;
}

// Lengths for cuDNN, [3][runs + 1] unless null, for tokens of `width` elements: new tokens of each run, all tokens of
// its text, and its first element in the queries. The first block writes them. `widened`: count only the converted
// tokens of the text.
__device__ inline void write_lengths(const int* starts, const i64* index, int runs, int width, bool widened,
                                     int sliding_window, int* lengths) {
    if (!lengths || blockIdx.x) return;
    for (int run = threadIdx.x; run <= runs; run += blockDim.x) {
        int tokens = run < runs ? starts[run + 1] - starts[run] : 0;
        lengths[run] = tokens;
        int hidden = widened && run < runs ? begin_widened(index, run, sliding_window) : 0;
        lengths[runs + 1 + run] = run < runs ? static_cast<int>(index[run]) + tokens - hidden : 0;
        lengths[2 * (runs + 1) + run] = starts[run] * width;
    }
}

// Norm and rotary embedding of prompts: queries, times x.scale, to `queries` [x.query, heads, D], keys and values to
// the cache. One warp per token and PREPARED heads, grid (ceil(x.query * ceil(all heads / PREPARED) / 4)).
constexpr int PREPARED = 4;  // loaded together, so that they do not wait for one another's place

__device__ inline int end_of_tile(int end) { return (end + CUDNN_KEYS - 1) / CUDNN_KEYS * CUDNN_KEYS; }

// `library`: cuDNN attends. In a cache that cuDNN reads directly, the entries after a run become 0 up to the end of a
// tile of CUDNN_KEYS positions (no other text is there). Queries have the compute dtype.
template <class T, int D>
__device__ void prepare_all(const Operands<T>& x, Runs runs, bool library, typename T::Element* queries) {
    int all = x.heads + 2 * x.new_heads, units = (all + PREPARED - 1) / PREPARED;
    int warp = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, token = warp / units, first = warp % units * PREPARED;
    if (token >= x.query) return;
    Head<D> heads[PREPARED];
#pragma unroll
    for (int i = 0; i < PREPARED; ++i)
        heads[i] = load_head<T, D>(x.qkv + (static_cast<i64>(token) * all + min(first + i, all - 1)) * D);
    int run = runs.rows[token];
    if (run < 0) return;
    i64 position = runs.position(x, run, token);
    if (position >= x.bounded(position + 1)) return;
    Angles<T, D> angles(x, position);
    int block = x.block_of(run, position);
    // The i-th token from a run's end clears the i-th entry after it, and every further entry at a distance of the
    // run's length.
    int tokens = runs.starts[run + 1] - runs.starts[run], end = static_cast<int>(x.write_index[run]) + tokens;
    int tile_end = library && !T::FLOAT8 ? x.bounded(end_of_tile(end)) : 0;
    int cleared = end + (runs.starts[run + 1] - 1 - token);
#pragma unroll
    for (int i = 0; i < PREPARED; ++i) {
        int head = first + i;
        if (head >= all) break;
        Head<D> made = heads[i];
        bool is_query = head < x.heads, is_key = !is_query && head < x.heads + x.kv_heads;
        const auto* weight = is_query ? x.q_norm : x.k_norm;
        if ((is_query || is_key) && weight) made = times(made, load_head<T, D>(weight), norm_of<D>(made, x.epsilon));
        if (is_query || is_key) angles.turn_head(made);
        else made = prepared_value<T, D>(made, x);
        if (is_query) {
            made = times(made, x.scale);
            auto* to = queries + (static_cast<i64>(token) * x.heads + head) * D;
            if (library) {
                store_head<T, D>(to, made);
            } else {
                store_head<typename T::Tile, D>(to, made);
            }
        } else {
            auto* cache = is_key ? x.key_cache : x.value_cache;
            int kv_head = (head - x.heads) % x.kv_heads;
            float scale = is_key ? x.key_scale : x.value_scale;
            store_cached<T, D>(cache + x.entry(block, kv_head, static_cast<int>(position)) * D, made, scale);
            Head<D> nothing = {};
            for (int at = cleared; at < tile_end; at += tokens)
                store_cached<T, D>(cache + x.entry(x.block_of(run, at), kv_head, at) * D, nothing, scale);
        }
    }
}

// The blocks of a float8 cache that runs see, as T, for cuDNN, which reads no float8. Block b of run r, counted from
// begin_widened, becomes block r * gridDim.x + b, with 0 after the run up to the end of a tile. Keys stay divided by
// their scale, values do not. Grid (most blocks that a run sees, runs, kv_heads).
template <class T, int D>
__device__ void widen_all(const Operands<T>& x, const int* starts, typename T::Element* keys,
                          typename T::Element* values) {
    constexpr int EACH = 8, TOGETHER = 4;  // numbers that a thread takes at a time, and loads before it waits
    int run = blockIdx.y, tokens = starts[run + 1] - starts[run];
    int first = begin_widened(x.write_index, run, x.sliding_window) + blockIdx.x * x.block_size;
    int end = static_cast<int>(x.write_index[run]) + tokens;
    if (!tokens || first >= end_of_tile(end)) return;
    i64 from = x.entry(x.block_of(run, first), blockIdx.z, 0) * D;
    i64 to = x.entry(run * gridDim.x + blockIdx.x, blockIdx.z, 0) * D;
    int stride = blockDim.x * EACH, all = x.block_size * D;
    for (int start = threadIdx.x * EACH; start < all; start += TOGETHER * stride) {
        uint2 key[TOGETHER], value[TOGETHER];
#pragma unroll
        for (int i = 0; i < TOGETHER; ++i) {
            int at = min(start + i * stride, all - EACH);
            key[i] = *reinterpret_cast<const uint2*>(x.key_cache + from + at);
            value[i] = *reinterpret_cast<const uint2*>(x.value_cache + from + at);
        }
#pragma unroll
        for (int i = 0; i < TOGETHER; ++i) {
            int at = start + i * stride;
            if (at >= all) break;
            bool there = first + at / D < end;
            T::widen8(keys + to + at, key[i], there, 1);
            T::widen8(values + to + at, value[i], there, x.value_scale);
        }
    }
}

// Prepared queries, in units of log 2, in the place of the projection in Operands: [query, heads, D].
template <class T, int D>
struct PreparedQueries {
    __device__ void load(u32 (&q)[D / 16][4], const Operands<T>& x, int, int kv_head, int first) const {
        int lane = threadIdx.x % 32, group = x.heads / x.kv_heads;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            int packed = first + lane / 4 + 8 * half, token = packed / group;
            bool there = token < x.query;
            int head = kv_head * group + packed % group;
            const auto* from = x.qkv + (static_cast<i64>(there ? token : 0) * x.heads + head) * D;
#pragma unroll
            for (int c = 0; c < D / 8; ++c) q[c / 2][half + 2 * (c % 2)] = there ? two(from + T::column(c)) : 0;
        }
    }
    __device__ void prepare(u32 (&)[D / 16][4], const Operands<T>&, int, int) const {}
};

// Grid (splits * row tiles, kv_heads), with the largest number of row tiles that the runs can have. Keys and values are
// in the cache; x.qkv has the prepared queries of all runs, x.block_table and x.write_index are those of the runs.
template <class T, int D, int TILES, class Images = Causal>
__device__ void attend_all(Operands<T> x, const int* starts, int runs, int splits, typename T::Element* mixed,
                           Parts parts, Images images = {}) {
    int number = blockIdx.x / splits;
    RunTile found = tile_of(starts, runs, x.heads / x.kv_heads, 16 * TILES, number);
    if (found.run < 0) return;
    i64 first = static_cast<i64>(starts[found.run]) * x.heads * D;
    x.query = starts[found.run + 1] - starts[found.run];
    x.qkv += first;
    x.block_table += static_cast<i64>(found.run) * x.max_blocks;
    x.write_index += found.run;
    Tile at = {0, found.tile, number, static_cast<int>(gridDim.x) / splits};
    images = images.of_run(starts[found.run], x.query);
    attend<T, D, TILES>(x, PreparedQueries<T, D>{}, at, splits, false, mixed + first, parts, images);
}
