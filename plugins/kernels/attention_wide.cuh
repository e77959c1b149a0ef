// Attention of heads whose tiles would not fit into shared memory, without tensor cores. A block has a few query heads
// of one KV head, and its warps share the keys: warp w has keys w, w + WIDE_WARPS, … of the text. So the terms and the
// order of a sum depend on positions alone, whatever else is in the call.
#pragma once

#include "attention_prompts.cuh"

constexpr int WIDE_WARPS = 16;
constexpr int WIDE_LINES = 2;  // query heads of a block, packed as in attention_tile.cuh

// Lines `first` to first + WIDE_LINES of the new tokens of `row`, whose keys and values are in the cache; load(token,
// head) gives a query. Results go to mixed [x.query, x.heads, D].
template <class T, int D, class Load>
__device__ void attend_wide(const Operands<T>& x, int row, int kv_head, int first, Load load,
                            typename T::Element* mixed) {
    __shared__ float sums[WIDE_WARPS][D];
    __shared__ float2 bounds[WIDE_WARPS];
    int warp = threadIdx.x / 32, group = x.heads / x.kv_heads, start = static_cast<int>(x.write_index[row]);
    int last = x.query * group - 1;
    Head<D> queries[WIDE_LINES];
    SeenKeys<D> seen[WIDE_LINES];
    int positions[WIDE_LINES], begins[WIDE_LINES], least = 0x7fffffff;
#pragma unroll
    for (int i = 0; i < WIDE_LINES; ++i) {
        int line = min(first + i, last), token = line / group, head = kv_head * group + line % group;
        queries[i] = load(token, head);
        if (x.sinks && warp == 0) seen[i].see_sink(x.sinks[head]);
        positions[i] = start + token;
        begins[i] = x.sliding_window ? max(0, positions[i] - x.sliding_window + 1) : 0;
        least = min(least, begins[i]);
    }
    int end = x.bounded(positions[WIDE_LINES - 1] + 1);
    for (int at = least - least % WIDE_WARPS + warp; at < end; at += WIDE_WARPS) {
        if (at < least) continue;
        i64 entry = x.entry(x.block_of(row, at), kv_head, at) * D;
        Head<D> key = load_cached<T, D>(x.key_cache + entry), value = load_cached<T, D>(x.value_cache + entry);
#pragma unroll
        for (int i = 0; i < WIDE_LINES; ++i)
            if (at >= begins[i] && at <= positions[i]) seen[i].see(queries[i], key, value, x.scale);
    }
#pragma unroll
    for (int i = 0; i < WIDE_LINES; ++i) {
        if (threadIdx.x % 32 == 0) bounds[warp] = make_float2(seen[i].largest, seen[i].weights);
        store_head<Fp32, D>(sums[warp], seen[i].sum);
        __syncthreads();
        int line = first + i, at = 2 * threadIdx.x;
        if (line <= last && at < D) {
            float largest = -INFINITE, weights = 0;
            for (int w = 0; w < WIDE_WARPS; ++w) largest = fmaxf(largest, bounds[w].x);
            float2 sum = make_float2(0, 0);
            for (int w = 0; w < WIDE_WARPS; ++w) {
                float keep = bounds[w].x == -INFINITE ? 0 : expf(bounds[w].x - largest);
                weights += keep * bounds[w].y;
                sum.x += keep * sums[w][at];
                sum.y += keep * sums[w][at + 1];
            }
            i64 to = (static_cast<i64>(line / group) * x.heads + kv_head * group + line % group) * D + at;
            T::store2(mixed + to, times(sum, make_float2(1 / weights, 1 / weights), 1));
        }
        __syncthreads();
    }
}

// Windows: grid (lines of a KV head / WIDE_LINES, kv_heads, batch).
template <class T, int D>
__device__ void attend_windows_wide(const Operands<T>& x, typename T::Element* mixed) {
    int row = blockIdx.z, start = static_cast<int>(x.write_index[row]);
    auto load = [&](int token, int head) {
        return prepared<T, D>(load_head<T, D>(x.projected(row, token, head, D)), x, x.q_norm, start + token);
    };
    i64 of_row = static_cast<i64>(row) * x.query * x.heads * D;
    attend_wide<T, D>(x, row, blockIdx.y, blockIdx.x * WIDE_LINES, load, mixed + of_row);
}

// Prepared queries of prompt runs: grid (the largest number of tiles that the runs can have, kv_heads).
template <class T, int D>
__device__ void attend_all_wide(Operands<T> x, const int* starts, int runs, typename T::Element* mixed) {
    RunTile tile = tile_of(starts, runs, x.heads / x.kv_heads, WIDE_LINES, blockIdx.x);
    if (tile.run < 0) return;
    i64 first = static_cast<i64>(starts[tile.run]) * x.heads * D;
    x.query = starts[tile.run + 1] - starts[tile.run];
    auto load = [&](int token, int head) {
        return load_head<T, D>(x.qkv + first + (static_cast<i64>(token) * x.heads + head) * D);
    };
    attend_wide<T, D>(x, tile.run, blockIdx.y, tile.tile * WIDE_LINES, load, mixed + first);
}
