// Bring together what the warps of a block, and then the blocks of a row, have seen of the keys.
#pragma once

#include "attention_tile.cuh"

constexpr int MAX_SPLITS = 32;

// What the blocks that share the keys of a row leave for the last of them.
struct Parts {
    float* sums;     // [row tiles, splits, ROWS, D]
    float2* bounds;  // [row tiles, splits, ROWS]: largest score, sum of weights
    int* tickets;    // [row tiles]: blocks that are done; zero before and after a launch
};

__device__ inline float fraction(float largest, float of) { return of == -INFINITE ? 0 : exp2f(largest - of); }

// Put the warps' rows into shared memory, on one scale. Afterwards `bounds` has, for each of the block's warps and its
// 16 rows, the largest score and the sum of weights.
template <int D, int TILES>
__device__ void share_rows(Rows<D>& rows, float* sums, float2 (&bounds)[WARPS][16]) {
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        float weights = rows.weights[half];
        weights += __shfl_xor_sync(0xffffffffu, weights, 1);
        weights += __shfl_xor_sync(0xffffffffu, weights, 2);
        if (lane % 4 == 0) bounds[warp][lane / 4 + 8 * half] = make_float2(rows.largest[half], weights);
    }
    __syncthreads();  // also: all warps are done with keys and values, whose memory `sums` takes
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        int line = lane / 4 + 8 * half;
        float largest = -INFINITE;
        for (int other = warp % TILES; other < WARPS; other += TILES) largest = fmaxf(largest, bounds[other][line].x);
        float keep = fraction(rows.largest[half], largest);
        float* to = sums + (warp * 16 + line) * (D + 8) + 2 * (lane % 4);
#pragma unroll
        for (int n = 0; n < D / 8; ++n)
            *reinterpret_cast<float2*>(to + 8 * n) =
                make_float2(rows.sum[n][2 * half] * keep, rows.sum[n][2 * half + 1] * keep);
    }
    __syncthreads();
}

// One row over all warps that worked on it.
template <int TILES>
__device__ float2 bounds_of(const float2 (&bounds)[WARPS][16], int line) {
    float2 all = make_float2(-INFINITE, 0);
    for (int warp = line / 16; warp < WARPS; warp += TILES) all.x = fmaxf(all.x, bounds[warp][line % 16].x);
    for (int warp = line / 16; warp < WARPS; warp += TILES)
        all.y += bounds[warp][line % 16].y * fraction(bounds[warp][line % 16].x, all.x);
    return all;
}

template <int D, int TILES>
__device__ float4 sum_of(const float* sums, int line, int column) {
    float4 all = make_float4(0, 0, 0, 0);
    for (int warp = line / 16; warp < WARPS; warp += TILES) {
        float4 one = *reinterpret_cast<const float4*>(sums + (warp * 16 + line % 16) * (D + 8) + column);
        all = make_float4(all.x + one.x, all.y + one.y, all.z + one.z, all.w + one.w);
    }
    return all;
}

// Wait for nobody: the block that finishes last learns it, and sees what the others wrote.
__device__ inline bool is_last(int* ticket, int blocks) {
    __shared__ bool last;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        last = atomicAdd(ticket, 1) == blocks - 1;
        if (last) *ticket = 0;
    }
    __syncthreads();
    if (last) __threadfence();
    return last;
}

// The share of each split in each row, [splits, ROWS], in shared memory. Several threads look after a row, so that all
// loads are under way at once.
template <int ROWS>
__device__ void share_of_splits(float* shares, const float2* bounds, int splits, int lines) {
    constexpr int THREADS = 32 * WARPS / ROWS, EACH = MAX_SPLITS / THREADS;
    int line = threadIdx.x / THREADS, first = threadIdx.x % THREADS;
    float2 one[EACH];
    float largest = -INFINITE, weights = 0;
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        int split = first + i * THREADS;
        one[i] = split < splits && line < lines ? __ldcg(bounds + split * ROWS + line) : make_float2(-INFINITE, 0);
    }
#pragma unroll
    for (int i = 0; i < EACH; ++i) largest = fmaxf(largest, one[i].x);
#pragma unroll
    for (int distance = 1; distance < THREADS; distance *= 2)
        largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, distance));
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        one[i].x = fraction(one[i].x, largest);
        weights += one[i].x * one[i].y;
    }
#pragma unroll
    for (int distance = 1; distance < THREADS; distance *= 2)
        weights += __shfl_xor_sync(0xffffffffu, weights, distance);
#pragma unroll
    for (int i = 0; i < EACH; ++i)
        if (first + i * THREADS < splits) shares[(first + i * THREADS) * ROWS + line] = one[i].x / weights;
    __syncthreads();
}

// The sums of all splits, weighted: calls write(line, column, values) for four columns at a time. Loads are made in
// batches, since each of them takes as long as a batch.
template <int D, int ROWS, class Write>
__device__ void sum_splits(const float* sums, const float* shares, int splits, int lines, Write write) {
    constexpr int UNITS = 4, BATCH = 4, STRIDE = 32 * WARPS;
    int units = lines * (D / 4);
    for (int first = threadIdx.x; first < units; first += UNITS * STRIDE) {
        float4 all[UNITS];
#pragma unroll
        for (int u = 0; u < UNITS; ++u) all[u] = make_float4(0, 0, 0, 0);
        for (int start = 0; start < splits; start += BATCH) {
            float4 one[UNITS][BATCH];
#pragma unroll
            for (int u = 0; u < UNITS; ++u)
#pragma unroll
                for (int i = 0; i < BATCH; ++i) {
                    int unit = first + u * STRIDE, split = start + i;
                    const float* at = sums + static_cast<i64>(split) * ROWS * D + unit * 4;
                    bool there = unit < units && split < splits;
                    one[u][i] = there ? __ldcg(reinterpret_cast<const float4*>(at)) : make_float4(0, 0, 0, 0);
                }
#pragma unroll
            for (int u = 0; u < UNITS; ++u)
#pragma unroll
                for (int i = 0; i < BATCH; ++i) {
                    int unit = min(first + u * STRIDE, units - 1), split = min(start + i, splits - 1);
                    float share = shares[split * ROWS + unit / (D / 4)];
                    float4 each = one[u][i];
                    all[u] = make_float4(all[u].x + share * each.x, all[u].y + share * each.y,
                                         all[u].z + share * each.z, all[u].w + share * each.w);
                }
        }
#pragma unroll
        for (int u = 0; u < UNITS; ++u) {
            int unit = first + u * STRIDE;
            if (unit < units) write(unit / (D / 4), unit % (D / 4) * 4, all[u]);
        }
    }
}
