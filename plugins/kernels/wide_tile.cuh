// Attention on tensor cores of rows that are too wide for the registers of one warp.
//
// A block has eight warps and ROWS = 16 * TILES rows. Queries, keys, values and weights are in shared memory: the warps
// share the keys of a step for the scores, and the columns of the values for the sums. The terms of a row's sum and
// their order do not depend on the rows next to it, nor on their number.
#pragma once

#include "copy.cuh"

constexpr int WIDE_WARPS = 8;
constexpr int WIDE_KEYS = 64;  // per step; no cache block may end inside

// How the warps share the scores of a step: a group of TILES warps has SPAN keys, and a warp of it 16 rows.
template <int TILES>
struct WideTile {
    static constexpr int ROWS = 16 * TILES, GROUPS = WIDE_WARPS / TILES, SPAN = WIDE_KEYS / GROUPS;
};

// Shared memory of a block. Keys, or keys and values, of one step after the other take turns in `buffers` buffers.
template <int WIDTH, int TILES>
struct WideMemory {
    using Tile = WideTile<TILES>;

    u16 *queries, *weights, *ring;  // [ROWS, WIDTH], [ROWS, WIDE_KEYS], [buffers, WIDE_KEYS, WIDTH]
    float *tops, *totals;           // [GROUPS, ROWS]: largest scores of a step; [ROWS]: sums of weights

    __device__ WideMemory(unsigned char* memory, int buffers) {
        queries = reinterpret_cast<u16*>(memory);
        weights = queries + Tile::ROWS * WIDTH;
        ring = weights + Tile::ROWS * WIDE_KEYS;
        tops = reinterpret_cast<float*>(ring + buffers * WIDE_KEYS * WIDTH);
        totals = tops + Tile::GROUPS * Tile::ROWS;
    }
};

// Offset of a chunk of 16 bytes in a tile of 16-bit elements: chunks are permuted so that eight rows fall into
// different banks.
template <int WIDTH>
__device__ int chunk_at(int row, int chunk) {
    return row * WIDTH + (chunk ^ (row & 7)) * 8;
}

// Scores of 16 rows, from `line` on, with SPAN keys, from `key` on: even and odd parts of a query have a sum each.
template <class T, int WIDTH, int SPAN>
__device__ void score_keys(float (&score)[SPAN / 8][4], const u16* queries, const u16* keys, int line, int key) {
    constexpr int TILES_OF_KEYS = SPAN / 8;
    int lane = threadIdx.x % 32;
    float odd[TILES_OF_KEYS][4] = {};
    u32 a[2][4], b[4];
#pragma unroll 2
    for (int k = 0; k < WIDTH / 32; ++k) {
#pragma unroll
        for (int i = 0; i < 2; ++i)
            load_matrices(a[i], shared_address(queries + chunk_at<WIDTH>(line + lane % 16, 4 * k + 2 * i + lane / 16)));
#pragma unroll
        for (int n = 0; n < TILES_OF_KEYS; ++n) {
            load_matrices(b, shared_address(keys + chunk_at<WIDTH>(key + 8 * n + lane % 8, 4 * k + lane / 8)));
            T::mma(score[n], a[0], b[0], b[1]);
            T::mma(odd[n], a[1], b[2], b[3]);
        }
    }
#pragma unroll
    for (int n = 0; n < TILES_OF_KEYS; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) score[n][i] += odd[n][i];
}

// Sums of a block's rows, over the keys of its steps, for the columns of a warp: a thread has rows lane / 4 and
// lane / 4 + 8 of every tile. Warp w also sums the weights of tile w.
template <int TILES, int COLUMNS>
struct WideSums {
    float sum[TILES][COLUMNS / 8][4] = {};
    float largest[TILES][2];  // of the scores, in units of log 2
    float total[4] = {};

    __device__ WideSums() {
#pragma unroll
        for (int m = 0; m < TILES; ++m) largest[m][0] = largest[m][1] = -INFINITE;
    }

    // Take the largest scores of a step into account.
    __device__ void raise(const float* tops) {
        constexpr int ROWS = WideTile<TILES>::ROWS, GROUPS = WideTile<TILES>::GROUPS;
        int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
        for (int m = 0; m < TILES; ++m)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                float top = largest[m][half];
#pragma unroll
                for (int g = 0; g < GROUPS; ++g) top = fmaxf(top, tops[g * ROWS + 16 * m + lane / 4 + 8 * half]);
                float keep = top == largest[m][half] ? 1 : exp2f(largest[m][half] - top);
                largest[m][half] = top;
                if (__all_sync(0xffffffffu, keep == 1)) continue;
#pragma unroll
                for (int n = 0; n < COLUMNS / 8; ++n) {
                    sum[m][n][2 * half] *= keep;
                    sum[m][n][2 * half + 1] *= keep;
                }
                if (warp == m) total[2 * half] *= keep;
            }
    }

    // Add the values of a step, from column `first` of WIDTH on, times their weights.
    template <class T, int WIDTH>
    __device__ void add(const u16* weights, const u16* values, int first) {
        int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        u32 ones = T::pack(make_float2(1, 1));
#pragma unroll
        for (int k = 0; k < WIDE_KEYS / 16; ++k) {
            u32 a[TILES][4], b[4];
#pragma unroll
            for (int m = 0; m < TILES; ++m) {
                load_matrices(a[m],
                              shared_address(weights + chunk_at<WIDE_KEYS>(16 * m + lane % 16, 2 * k + lane / 16)));
                if (warp == m) T::mma(total, a[m], ones, ones);
            }
#pragma unroll
            for (int n = 0; n < COLUMNS / 16; ++n) {
                int chunk = (first + warp * COLUMNS) / 8 + 2 * n + lane / 16;
                load_transposed(b, shared_address(values + chunk_at<WIDTH>(16 * k + lane % 16, chunk)));
#pragma unroll
                for (int m = 0; m < TILES; ++m) {
                    T::mma(sum[m][2 * n], a[m], b[0], b[1]);
                    T::mma(sum[m][2 * n + 1], a[m], b[2], b[3]);
                }
            }
        }
    }
};

// Scores of a step for the rows and keys of a warp, in units of log 2: first their maxima are shared, then their
// weights.
template <class T, int TILES>
struct WideScores {
    using Tile = WideTile<TILES>;
    static constexpr int SPAN = Tile::SPAN;

    float score[SPAN / 8][4] = {};

    // The keys begin at `position`; sees(half, position) tells whether a row of the thread sees one.
    template <class Sees>
    __device__ void mask(int position, Sees sees, float scale) {
        int lane = threadIdx.x % 32;
#pragma unroll
        for (int n = 0; n < SPAN / 8; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                bool visible = sees(i / 2, position + 8 * n + 2 * (lane % 4) + i % 2);
                score[n][i] = visible ? score[n][i] * scale : -INFINITE;
            }
    }
    __device__ void share_tops(float* tops, int line, int group) const {
        int lane = threadIdx.x % 32;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float top = -INFINITE;
#pragma unroll
            for (int n = 0; n < SPAN / 8; ++n) top = fmaxf(top, fmaxf(score[n][2 * half], score[n][2 * half + 1]));
            top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
            top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2));
            if (lane % 4 == 0) tops[group * Tile::ROWS + line + lane / 4 + 8 * half] = top;
        }
    }
    // `largest`: of the earlier steps, for the two rows of a thread.
    __device__ void share_weights(u16* weights, const float* tops, float (&largest)[2], int line, int group) const {
        int lane = threadIdx.x % 32;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            int row = line + lane / 4 + 8 * half;
#pragma unroll
            for (int g = 0; g < Tile::GROUPS; ++g) largest[half] = fmaxf(largest[half], tops[g * Tile::ROWS + row]);
            float base = largest[half] == -INFINITE ? 0 : largest[half];
#pragma unroll
            for (int n = 0; n < SPAN / 8; ++n) {
                float2 weight = make_float2(exp2f(score[n][2 * half] - base), exp2f(score[n][2 * half + 1] - base));
                u16* to = weights + chunk_at<WIDE_KEYS>(row, (group * SPAN) / 8 + n) + 2 * (lane % 4);
                *reinterpret_cast<u32*>(to) = T::pack(weight);
            }
        }
    }
};
