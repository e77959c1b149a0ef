// Latent attention on tensor cores: all heads of the new tokens of a text are rows of one matmul with its keys.
//
// A block has eight warps and ROWS = 16 * TILES rows. Queries, keys and weights are in shared memory, because a row's
// query and its sum (512 values) are too large for the registers of one warp: the warps share the keys of a step for
// the scores, and the columns of the values for the sums. The terms of a row's sum and their order depend on its
// position and the number of splits, and not on the rows next to it.
#pragma once

#include "latent_call.cuh"

constexpr int KEYS = 64;  // per step; no cache block may end inside
constexpr int WARPS = 8;
constexpr int COLUMNS = RANK / WARPS;  // of the values, for a warp
constexpr int CHUNKS = CACHED / 8;     // of 16 bytes, in a query or a key
constexpr int PAIRS = ROTATED / 16;    // pairs of chunks that rotate with each other
constexpr float LOG2_E = 1.44269504088896341f;

// Offset of a chunk in a tile of 16-bit elements: chunks are permuted so that eight rows fall into different banks.
template <int WIDTH>
__device__ int chunk_at(int row, int chunk) {
    return row * WIDTH + (chunk ^ (row & 7)) * 8;
}

// The rows of a block: `lines` of them, from row `first` of the new tokens of its text, which begin at position
// `start`.
template <int TILES>
struct LatentRows {
    static constexpr int ROWS = 16 * TILES, GROUPS = WARPS / TILES, SPAN = KEYS / GROUPS;

    int text, start, first, lines;
    i64 row;  // of `first` among all rows of the call

    template <class T>
    __device__ int position(const LatentCall<T>& x, int line) const {
        return start + (first + line) / x.heads;
    }
};

// Shared memory of a block.
template <int TILES>
struct LatentMemory {
    using Rows = LatentRows<TILES>;

    u16 *queries, *weights, *keys;  // [ROWS, CACHED], [ROWS, KEYS], [stages, KEYS, CACHED]
    float *tops, *totals;           // [GROUPS, ROWS]: largest scores of a step; [ROWS]: sums of weights

    __device__ LatentMemory(unsigned char* memory, int stages) {
        queries = reinterpret_cast<u16*>(memory);
        weights = queries + Rows::ROWS * CACHED;
        keys = weights + Rows::ROWS * KEYS;
        tops = reinterpret_cast<float*>(keys + stages * KEYS * CACHED);
        totals = tops + Rows::GROUPS * Rows::ROWS;
    }
};

// Queries of the block's rows, the first part of each rotated. The copies belong to the next group.
template <class T, int TILES>
__device__ void load_queries(const LatentCall<T>& x, const LatentRows<TILES>& rows, u16* queries) {
    constexpr int ROWS = LatentRows<TILES>::ROWS;
    const u16* from = x.query + rows.row * CACHED;
    for (int n = threadIdx.x; n < ROWS * (CHUNKS - 2 * PAIRS); n += 32 * WARPS) {
        int line = n / (CHUNKS - 2 * PAIRS), chunk = 2 * PAIRS + n % (CHUNKS - 2 * PAIRS);
        bool there = line < rows.lines;
        const u16* at = from + static_cast<i64>(there ? line : 0) * CACHED + 8 * chunk;
        copy16(shared_address(queries + chunk_at<CACHED>(line, chunk)), at, there);
    }
    for (int n = threadIdx.x; n < ROWS * PAIRS; n += 32 * WARPS) {
        int line = n / PAIRS, chunk = n % PAIRS;
        u32 low[4] = {}, high[4] = {};
        if (line < rows.lines) {
            const u16* at = from + static_cast<i64>(line) * CACHED + 8 * chunk;
            i64 angle = static_cast<i64>(rows.position(x, line)) * (ROTATED / 2) + 8 * chunk;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                float2 first = T::load2(at + 2 * i), second = T::load2(at + ROTATED / 2 + 2 * i);
                turn(first, second, T::load2(x.cosine + angle + 2 * i), T::load2(x.sine + angle + 2 * i));
                low[i] = T::pack(first);
                high[i] = T::pack(second);
            }
        }
        *reinterpret_cast<uint4*>(queries + chunk_at<CACHED>(line, chunk)) = make_uint4(low[0], low[1], low[2], low[3]);
        *reinterpret_cast<uint4*>(queries + chunk_at<CACHED>(line, chunk + PAIRS)) =
            make_uint4(high[0], high[1], high[2], high[3]);
    }
}

// Start the copies of the `count` keys of a step, which begin at `from`. Further places of the step become zeros.
template <class T>
__device__ void fetch_keys(const typename T::Element* from, int count, u16* keys) {
#pragma unroll 6
    for (int n = threadIdx.x; n < KEYS * CHUNKS; n += 32 * WARPS) {
        int line = n / CHUNKS, chunk = n % CHUNKS;
        bool there = line < count;
        const auto* at = from + (there ? line : 0) * CACHED + 8 * chunk;
        copy16(shared_address(keys + chunk_at<CACHED>(line, chunk)), at, there);
    }
}

// Scores of 16 rows, from `line` on, with SPAN keys, from `key` on: even and odd parts of a query have a sum each.
template <class T, int SPAN>
__device__ void score_keys(float (&score)[SPAN / 8][4], const u16* queries, const u16* keys, int line, int key) {
    constexpr int TILES_OF_KEYS = SPAN / 8;
    int lane = threadIdx.x % 32;
    float odd[TILES_OF_KEYS][4] = {};
    u32 a[2][4], b[4];
#pragma unroll 2
    for (int k = 0; k < CACHED / 32; ++k) {
#pragma unroll
        for (int i = 0; i < 2; ++i)
            load_matrices(a[i],
                          shared_address(queries + chunk_at<CACHED>(line + lane % 16, 4 * k + 2 * i + lane / 16)));
#pragma unroll
        for (int n = 0; n < TILES_OF_KEYS; ++n) {
            load_matrices(b, shared_address(keys + chunk_at<CACHED>(key + 8 * n + lane % 8, 4 * k + lane / 8)));
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
template <int TILES>
struct LatentSums {
    float sum[TILES][COLUMNS / 8][4] = {};
    float largest[TILES][2];  // of the scores, in units of log 2
    float total[4] = {};

    __device__ LatentSums() {
#pragma unroll
        for (int m = 0; m < TILES; ++m) largest[m][0] = largest[m][1] = -INFINITE;
    }

    // Take the largest scores of a step into account.
    __device__ void raise(const float* tops) {
        constexpr int ROWS = 16 * TILES, GROUPS = WARPS / TILES;
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

    // Add the values of a step, times their weights.
    template <class T>
    __device__ void add(const u16* weights, const u16* keys) {
        int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        u32 ones = T::pack(make_float2(1, 1));
#pragma unroll
        for (int k = 0; k < KEYS / 16; ++k) {
            u32 a[TILES][4], b[4];
#pragma unroll
            for (int m = 0; m < TILES; ++m) {
                load_matrices(a[m], shared_address(weights + chunk_at<KEYS>(16 * m + lane % 16, 2 * k + lane / 16)));
                if (warp == m) T::mma(total, a[m], ones, ones);
            }
#pragma unroll
            for (int n = 0; n < COLUMNS / 16; ++n) {
                int chunk = (ROTATED + warp * COLUMNS) / 8 + 2 * n + lane / 16;
                load_transposed(b, shared_address(keys + chunk_at<CACHED>(16 * k + lane % 16, chunk)));
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
struct LatentScores {
    using Rows = LatentRows<TILES>;
    static constexpr int SPAN = Rows::SPAN;

    float score[SPAN / 8][4] = {};

    // The keys begin at `position`; a thread has rows that see the positions up to `seen`.
    __device__ void mask(int position, const int (&seen)[2], float scale) {
        int lane = threadIdx.x % 32;
#pragma unroll
        for (int n = 0; n < SPAN / 8; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                bool visible = position + 8 * n + 2 * (lane % 4) + i % 2 <= seen[i / 2];
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
            if (lane % 4 == 0) tops[group * Rows::ROWS + line + lane / 4 + 8 * half] = top;
        }
    }
    // `largest`: of the earlier steps, for the two rows of a thread.
    __device__ void share_weights(u16* weights, const float* tops, float (&largest)[2], int line, int group) const {
        int lane = threadIdx.x % 32;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            int row = line + lane / 4 + 8 * half;
#pragma unroll
            for (int g = 0; g < Rows::GROUPS; ++g) largest[half] = fmaxf(largest[half], tops[g * Rows::ROWS + row]);
            float base = largest[half] == -INFINITE ? 0 : largest[half];
#pragma unroll
            for (int n = 0; n < SPAN / 8; ++n) {
                float2 weight = make_float2(exp2f(score[n][2 * half] - base), exp2f(score[n][2 * half + 1] - base));
                u16* to = weights + chunk_at<KEYS>(row, (group * SPAN) / 8 + n) + 2 * (lane % 4);
                *reinterpret_cast<u32*>(to) = T::pack(weight);
            }
        }
    }
};
