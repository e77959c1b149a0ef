// Latent attention on tensor cores: all heads of the new tokens of a text are rows of one matmul with its keys.
//
// The terms of a row's sum and their order depend on its position and the number of splits (wide_tile.cuh).
#pragma once

#include "latent_call.cuh"
#include "wide_tile.cuh"

constexpr int COLUMNS = RANK / WIDE_WARPS;  // of the values, for a warp
constexpr int CHUNKS = CACHED / 8;          // of 16 bytes, in a query or a key
constexpr int PAIRS = ROTATED / 16;         // pairs of chunks that rotate with each other

// The rows of a block: `lines` of them, from row `first` of the new tokens of its text, which begin at position
// `start`.
template <int TILES>
struct LatentRows : WideTile<TILES> {
    int text, start, first, lines;
    i64 row;  // of `first` among all rows of the call

    template <class T>
    __device__ int position(const LatentCall<T>& x, int line) const {
        return start + (first + line) / x.heads;
    }
};

// Queries of the block's rows, the first part of each rotated. The copies belong to the next group.
template <class T, int TILES>
__device__ void load_queries(const LatentCall<T>& x, const LatentRows<TILES>& rows, u16* queries) {
    constexpr int ROWS = LatentRows<TILES>::ROWS;
    const u16* from = x.query + rows.row * CACHED;
    for (int n = threadIdx.x; n < ROWS * (CHUNKS - 2 * PAIRS); n += 32 * WIDE_WARPS) {
        int line = n / (CHUNKS - 2 * PAIRS), chunk = 2 * PAIRS + n % (CHUNKS - 2 * PAIRS);
        bool there = line < rows.lines;
        const u16* at = from + static_cast<i64>(there ? line : 0) * CACHED + 8 * chunk;
        copy16(shared_address(queries + chunk_at<CACHED>(line, chunk)), at, there);
    }
    for (int n = threadIdx.x; n < ROWS * PAIRS; n += 32 * WIDE_WARPS) {
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
    for (int n = threadIdx.x; n < WIDE_KEYS * CHUNKS; n += 32 * WIDE_WARPS) {
        int line = n / CHUNKS, chunk = n % CHUNKS;
        bool there = line < count;
        const auto* at = from + (there ? line : 0) * CACHED + 8 * chunk;
        copy16(shared_address(keys + chunk_at<CACHED>(line, chunk)), at, there);
    }
}
