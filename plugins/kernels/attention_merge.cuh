// Merge the partial results of the warps of a block, and then of the blocks of a row.
#pragma once

#include "attention_tile.cuh"

constexpr int MAX_SPLITS = 32;

// Partial results of the blocks that share the keys of a row, for the last of them.
struct Parts {
    float* sums;     // [row tiles, splits, ROWS, D]
    float2* bounds;  // [row tiles, splits, ROWS]: largest score, sum of weights
    int* tickets;    // [row tiles]: finished blocks; zero before and after a launch
};

__device__ inline float4 plus(float4 a, float4 b) { return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w); }
__device__ inline float4 scaled(float4 x, float by) { return make_float4(x.x * by, x.y * by, x.z * by, x.w * by); }

__device__ inline float fraction(float largest, float of) { return of == -INFINITE ? 0 : exp2f(largest - of); }

// Put the warps' rows into shared memory, on one scale. Afterwards `bounds` holds, for each row, the largest score and
// the sum of weights over all warps that worked on it.
template <class T, int D, int TILES>
__device__ void share_rows(Rows<D>& rows, float* sums, float2 (&bounds)[16 * TILES]) {
    __shared__ float2 of_warp[WARPS][16];
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        float weights = rows.weights[half];
        weights += __shfl_xor_sync(0xffffffffu, weights, 1);
        weights += __shfl_xor_sync(0xffffffffu, weights, 2);
        if (lane % 4 == 0) of_warp[warp][lane / 4 + 8 * half] = make_float2(rows.largest[half], weights);
    }
    __syncthreads();  // also: all warps are done with keys and values, whose memory `sums` reuses
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        int line = lane / 4 + 8 * half;
        float largest = -INFINITE, weights = 0;
#pragma unroll
        for (int i = 0; i < WARPS / TILES; ++i) largest = fmaxf(largest, of_warp[warp % TILES + i * TILES][line].x);
#pragma unroll
        for (int i = 0; i < WARPS / TILES; ++i) {
            float2 one = of_warp[warp % TILES + i * TILES][line];
            weights += one.y * fraction(one.x, largest);
        }
        if (warp < TILES && lane % 4 == 0) bounds[warp * 16 + line] = make_float2(largest, weights);
        float keep = fraction(rows.largest[half], largest);
        T::template spread<D>(sums + (warp * 16 + line) * (D + 8), rows.sum, half, keep);
    }
    __syncthreads();
}

// Four columns of a row, summed over all warps that worked on it.
template <int D, int TILES>
__device__ float4 sum_of(const float* sums, int line, int column) {
    float4 all = make_float4(0, 0, 0, 0);
#pragma unroll
    for (int i = 0; i < WARPS / TILES; ++i) {
        const float* of_warp = sums + ((line / 16 + i * TILES) * 16 + line % 16) * (D + 8);
        all = plus(all, *reinterpret_cast<const float4*>(of_warp + column));
    }
    return all;
}

// Does not wait: the block that finishes last gets true, and sees the writes of the others.
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

// The share of each split in each row, [splits, ROWS], in shared memory. Several threads work on a row, so that all
// loads are in flight at once.
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

// The weighted sums of all splits: calls write(line, column, values) for four columns at a time. Loads are batched,
// since a single load takes as long as a batch.
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
                    all[u] = plus(all[u], scaled(one[u][i], shares[split * ROWS + unit / (D / 4)]));
                }
        }
#pragma unroll
        for (int u = 0; u < UNITS; ++u) {
            int unit = first + u * STRIDE;
            if (unit < units) write(unit / (D / 4), unit % (D / 4) * 4, all[u]);
        }
    }
}
