// One call of latent_attention: new tokens of windows or of prompt runs, and where their text is in the cache.
#pragma once

#include "copy.cuh"
#include "rotation.cuh"
#include "run_tiles.cuh"

constexpr int ROTATED = 64, RANK = 512, CACHED = ROTATED + RANK;  // values of a cached key; the last RANK are its value

template <class T>
struct LatentCall {
    using Element = typename T::Element;

    const Element* query;    // [tokens, heads, CACHED]
    const Element* key;      // [tokens, CACHED]
    Element* cache;          // [blocks, block_size, CACHED]
    const int* block_table;  // [texts, max_blocks]
    const i64* write_index;  // [texts]
    const int* rows;         // [tokens]: run of each token, negative for padding; null: windows of `window` tokens each
    const int* starts;       // [runs + 1]; null for windows
    const Element* cosine;   // [positions, ROTATED / 2]
    const Element* sine;
    int tokens, window, heads, block_size, max_blocks;
    float scale;

    __device__ int text_of(int token) const { return rows ? rows[token] : token / window; }
    __device__ int first_of(int text) const { return starts ? starts[text] : text * window; }
    __device__ int count_of(int text) const { return starts ? starts[text + 1] - starts[text] : window; }
    __device__ i64 position_of(int text, int token) const { return write_index[text] + token - first_of(text); }
    // One past the last position that the table has room for, given the requested one.
    __device__ int bounded(i64 end) const {
        i64 room = static_cast<i64>(max_blocks) * block_size;
        return static_cast<int>(end < room ? end : room);
    }
    __device__ Element* entry(int text, int position) const {
        i64 block = block_table[static_cast<i64>(text) * max_blocks + position / block_size];
        return cache + (block * block_size + position % block_size) * CACHED;
    }
};

// Rotate the new keys and write them into the cache: one warp per token, grid (ceil(tokens / 4)).
template <class T>
__device__ void append_keys(const LatentCall<T>& x) {
    constexpr int EACH = 16 / sizeof(typename T::Element);  // elements that a lane copies at a time
    int token = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (token >= x.tokens) return;
    int text = x.text_of(token);
    if (text < 0) return;
    i64 position = x.position_of(text, token);
    if (position >= x.bounded(position + 1)) return;
    const auto* from = x.key + static_cast<i64>(token) * CACHED;
    auto* to = x.entry(text, static_cast<int>(position));
    if (lane < ROTATED / 4) {
        i64 angle = position * (ROTATED / 2) + 2 * lane;
        float2 low = T::load2(from + 2 * lane), high = T::load2(from + ROTATED / 2 + 2 * lane);
        turn(low, high, T::load2(x.cosine + angle), T::load2(x.sine + angle));
        T::store2(to + 2 * lane, low);
        T::store2(to + ROTATED / 2 + 2 * lane, high);
    }
#pragma unroll
    for (int at = ROTATED + lane * EACH; at < CACHED; at += 32 * EACH)
        *reinterpret_cast<uint4*>(to + at) = *reinterpret_cast<const uint4*>(from + at);
}
