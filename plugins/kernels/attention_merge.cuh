// Bring together what the warps of a block, and then the blocks of a row, have seen of the keys.
#pragma once

#include "attention_tile.cuh"

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

// The share of each split in each row, [splits, ROWS], in shared memory.
template <int ROWS>
__device__ void share_of_splits(float2* shares, const float2* bounds, int splits, int lines) {
    for (int i = threadIdx.x; i < splits * ROWS; i += 32 * WARPS)
        if (i % ROWS < lines) shares[i] = __ldcg(bounds + i);
    __syncthreads();
    if (threadIdx.x < lines) {
        float2 all = make_float2(-INFINITE, 0);
        for (int s = 0; s < splits; ++s) all.x = fmaxf(all.x, shares[s * ROWS + threadIdx.x].x);
        for (int s = 0; s < splits; ++s) {
            float2& one = shares[s * ROWS + threadIdx.x];
            one.x = fraction(one.x, all.x);
            all.y += one.x * one.y;
        }
        for (int s = 0; s < splits; ++s) shares[s * ROWS + threadIdx.x].x /= all.y;
    }
    __syncthreads();
}
