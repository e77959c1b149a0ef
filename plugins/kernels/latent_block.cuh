// Work of one thread block: its share of the keys of a row tile; and the sum over all blocks that share them.
#pragma once

#include "latent_tile.cuh"

// Partial results of the splits of all rows of a call, row after row of each split.
struct LatentParts {
    float* sums;     // [splits, rows, RANK]
    float2* bounds;  // [splits, rows]: largest score, sum of weights
};

// The rows of a block's tile; `lines` is 0 if it has none. Windows: grid (splits * tiles, texts); prompt runs:
// grid (splits * most tiles of all runs).
template <class T, int TILES>
__device__ LatentRows<TILES> rows_of(const LatentCall<T>& x, int runs, int splits) {
    constexpr int ROWS = LatentRows<TILES>::ROWS;
    int number = blockIdx.x / splits, text = blockIdx.y, tile = gridDim.x / splits - 1 - number;
    if (x.starts) {
        RunTile found = tile_of(x.starts, runs, x.heads, ROWS, number);
        text = found.run;
        tile = found.tile;
    }
    LatentRows<TILES> rows = {{}, text, 0, tile * ROWS, 0, 0};
    if (text < 0) return rows;
    rows.lines = min(ROWS, x.count_of(text) * x.heads - rows.first);
    rows.row = static_cast<i64>(x.first_of(text)) * x.heads + rows.first;
    rows.start = static_cast<int>(x.write_index[text]);
    return rows;
}

// `stages`: 2, or 1 where shared memory has no room for two steps.
template <class T, int TILES>
__device__ void attend(const LatentCall<T>& x, int runs, int splits, int stages, typename T::Element* mixed,
                       LatentParts parts) {
    using Rows = LatentRows<TILES>;
    extern __shared__ __align__(1024) unsigned char memory[];
    WideMemory<CACHED, TILES> shared(memory, stages);
    Rows rows = rows_of<T, TILES>(x, runs, splits);
    if (rows.lines <= 0) return;
    int split = blockIdx.x % splits, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    int end = x.bounded(rows.position(x, rows.lines - 1) + 1), steps = (end + WIDE_KEYS - 1) / WIDE_KEYS;

    auto fetch = [&](int step, int stage) {
        if (step < steps)
            fetch_keys<T>(x.entry(rows.text, step * WIDE_KEYS), end - step * WIDE_KEYS,
                          shared.ring + stage * WIDE_KEYS * CACHED);
        close_copies();
    };
    load_queries(x, rows, shared.queries);
    if (stages > 1) fetch(split, 0);

    int line = warp % TILES * 16, group = warp / TILES;
    const int seen[2] = {rows.position(x, line + lane / 4), rows.position(x, line + lane / 4 + 8)};
    float largest[2] = {-INFINITE, -INFINITE}, scale = x.scale * LOG2_E;
    WideSums<TILES, COLUMNS> sums;
    // A block takes every `splits`th step, counted from the beginning of the text.
    for (int step = split, stage = 0; step < steps; step += splits, stage ^= stages - 1) {
        if (stages == 1) {
            __syncthreads();  // all warps are done with the previous step
            fetch(step, 0);
        }
        wait_copies<0>();
        __syncthreads();
        if (stages > 1) fetch(step + splits, stage ^ 1);
        const u16* keys = shared.ring + stage * WIDE_KEYS * CACHED;
        WideScores<T, TILES> scores;
        score_keys<T, CACHED, Rows::SPAN>(scores.score, shared.queries, keys, line, group * Rows::SPAN);
        scores.mask(step * WIDE_KEYS + group * Rows::SPAN, [&](int half, int at) { return at <= seen[half]; }, scale);
        scores.share_tops(shared.tops, line, group);
        __syncthreads();
        scores.share_weights(shared.weights, shared.tops, largest, line, group);
        sums.raise(shared.tops);
        __syncthreads();
        sums.template add<T, CACHED>(shared.weights, keys, ROTATED);
    }
    wait_copies<0>();

    // The largest scores and the sums of weights of all rows.
    __syncthreads();
    bool alone = splits == 1;
    i64 part = split * static_cast<i64>(x.tokens) * x.heads + rows.row;
    if (warp < TILES && lane % 4 == 0)
#pragma unroll
        for (int m = 0; m < TILES; ++m)
            if (warp == m)
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    int row = 16 * m + lane / 4 + 8 * half;
                    shared.totals[row] = sums.total[2 * half];
                    if (!alone && row < rows.lines)
                        parts.bounds[part + row] = make_float2(sums.largest[m][half], sums.total[2 * half]);
                }
    __syncthreads();
#pragma unroll
    for (int m = 0; m < TILES; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            int row = 16 * m + lane / 4 + 8 * half;
            if (row >= rows.lines) continue;
            float by = alone ? 1 / shared.totals[row] : 1;
#pragma unroll
            for (int n = 0; n < COLUMNS / 8; ++n) {
                int column = warp * COLUMNS + 8 * n + 2 * (lane % 4);
                float2 value = make_float2(sums.sum[m][n][2 * half] * by, sums.sum[m][n][2 * half + 1] * by);
                if (alone) {
                    T::store2(mixed + (rows.row + row) * RANK + column, value);
                } else {
                    *reinterpret_cast<float2*>(parts.sums + (part + row) * RANK + column) = value;
                }
            }
        }
}

// The sum over the splits of a row, in their order: grid (rows), a thread has four columns.
template <class T>
__device__ void merge_splits(const LatentCall<T>& x, int splits, typename T::Element* mixed, LatentParts parts) {
    i64 row = blockIdx.x, all = static_cast<i64>(x.tokens) * x.heads;
    if (x.rows && x.rows[row / x.heads] < 0) return;
    float largest = -INFINITE, weights = 0;
    for (int i = 0; i < splits; ++i) largest = fmaxf(largest, parts.bounds[i * all + row].x);
    float4 sum = make_float4(0, 0, 0, 0);
    for (int i = 0; i < splits; ++i) {
        float2 bound = parts.bounds[i * all + row];
        float4 one = *reinterpret_cast<const float4*>(parts.sums + (i * all + row) * RANK + 4 * threadIdx.x);
        float share = exp2f(bound.x - largest);  // 0 for a split without keys
        weights += share * bound.y;
        sum = make_float4(sum.x + share * one.x, sum.y + share * one.y, sum.z + share * one.z, sum.w + share * one.w);
    }
    auto* to = mixed + row * RANK + 4 * threadIdx.x;
    T::store2(to, make_float2(sum.x / weights, sum.y / weights));
    T::store2(to + 2, make_float2(sum.z / weights, sum.w / weights));
}
