// Work on one head of one token before attention: norm, rotary embedding, its place in the cache.
#pragma once

#include "attention_cached.cuh"

template <class T>
struct Operands {
    using Element = typename T::Element;
    using Cached = typename T::Cached;

    const Element* qkv;      // [batch, query, heads + 2 * kv_heads, D]
    Cached* key_cache;       // [blocks, kv_heads, block_size, D]
    Cached* value_cache;
    const int* block_table;  // [batch, max_blocks]
    const i64* write_index;  // [batch]
    const Element* cosine;   // [positions, D / 2]
    const Element* sine;
    const Element* q_norm;   // [D], or null: no norm
    const Element* k_norm;
    int query, heads, kv_heads, block_size, max_blocks, sliding_window;
    float scale, epsilon;
    float key_scale, value_scale;  // divisors of the cached values; `scale` includes that of the keys

    __device__ const Element* projected(int row, int token, int head, int width) const {
        return qkv + (static_cast<i64>(row * query + token) * (heads + 2 * kv_heads) + head) * width;
    }
    __device__ int block_of(int row, int position) const {
        return block_table[static_cast<i64>(row) * max_blocks + position / block_size];
    }
    // The number of the cache entry, to be multiplied by D.
    __device__ i64 entry(int block, int kv_head, int position) const {
        return (static_cast<i64>(block) * kv_heads + kv_head) * block_size + position % block_size;
    }
    // One past the last position that the table has room for, given the requested one.
    __device__ int bounded(i64 end) const {
        i64 room = static_cast<i64>(max_blocks) * block_size;
        return static_cast<int>(end < room ? end : room);
    }
};

// One head held by a warp: lane l < D / 4 has elements 2l and 2l + 1 of either half, which rotate with each other.
struct Head {
    float2 low, high;
};

__device__ inline float warp_sum(float x) {
    for (int distance = 16; distance; distance /= 2) x += __shfl_xor_sync(0xffffffffu, x, distance);
    return x;
}

template <class T, int D>
__device__ Head load_head(const typename T::Element* from) {
    int lane = threadIdx.x % 32;
    if (lane >= D / 4) return {make_float2(0, 0), make_float2(0, 0)};
    return {T::load2(from + 2 * lane), T::load2(from + D / 2 + 2 * lane)};
}

template <class T, int D>
__device__ void store_head(typename T::Element* to, Head x) {
    int lane = threadIdx.x % 32;
    if (lane >= D / 4) return;
    T::store2(to + 2 * lane, x.low);
    T::store2(to + D / 2 + 2 * lane, x.high);
}

// The cached form of a head: divided by the scale of the cache, and back.
template <class T, int D>
__device__ void store_cached(typename T::Cached* to, Head x, float scale) {
    int lane = threadIdx.x % 32;
    if (lane >= D / 4) return;
    T::store_cached2(to + 2 * lane, x.low, scale);
    T::store_cached2(to + D / 2 + 2 * lane, x.high, scale);
}

template <class T, int D>
__device__ Head load_cached(const typename T::Cached* from) {
    int lane = threadIdx.x % 32;
    if (lane >= D / 4) return {make_float2(0, 0), make_float2(0, 0)};
    return {T::load_cached2(from + 2 * lane), T::load_cached2(from + D / 2 + 2 * lane)};
}

__device__ inline float2 times(float2 a, float2 b, float c) { return make_float2(a.x * b.x * c, a.y * b.y * c); }

__device__ inline void turn(float2& low, float2& high, float2 cosine, float2 sine) {
    float2 first = low, second = high;
    low = make_float2(first.x * cosine.x - second.x * sine.x, first.y * cosine.y - second.y * sine.y);
    high = make_float2(second.x * cosine.x + first.x * sine.x, second.y * cosine.y + first.y * sine.y);
}

// The factor of RMS norm for a head, before its weight.
template <int D>
__device__ float norm_of(Head x, float epsilon) {
    float squares = x.low.x * x.low.x + x.low.y * x.low.y + x.high.x * x.high.x + x.high.y * x.high.y;
    return rsqrtf(warp_sum(squares) / D + epsilon);
}

// RMS norm (unless `weight` is null) and rotary embedding of a query or key at `position`, in float32.
template <class T, int D>
__device__ Head prepared(Head x, const Operands<T>& with, const typename T::Element* weight, int position) {
    int lane = threadIdx.x % 32;
    if (weight) {
        float norm = norm_of<D>(x, with.epsilon);
        Head scale = load_head<T, D>(weight);
        x = {times(x.low, scale.low, norm), times(x.high, scale.high, norm)};
    }
    if (lane < D / 4) {
        i64 at = static_cast<i64>(position) * (D / 2) + 2 * lane;
        turn(x.low, x.high, T::load2(with.cosine + at), T::load2(with.sine + at));
    }
    return x;
}

template <class T, int D>
__device__ Head new_key(const Operands<T>& x, int row, int token, int kv_head, int position) {
    Head head = load_head<T, D>(x.projected(row, token, x.heads + kv_head, D));
    return prepared<T, D>(head, x, x.k_norm, position);
}

template <class T, int D>
__device__ Head new_value(const Operands<T>& x, int row, int token, int kv_head) {
    return load_head<T, D>(x.projected(row, token, x.heads + x.kv_heads + kv_head, D));
}

// Writes keys and values of all new tokens: one warp per token and KV head, grid (ceil(query * kv_heads / 4), batch).
template <class T, int D>
__device__ void append_all(const Operands<T>& x) {
    int unit = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    if (unit >= x.query * x.kv_heads) return;
    int row = blockIdx.y, token = unit / x.kv_heads, kv_head = unit % x.kv_heads;
    i64 position = x.write_index[row] + token;
    if (position >= x.bounded(position + 1)) return;
    i64 at = x.entry(x.block_of(row, position), kv_head, position) * D;
    store_cached<T, D>(x.key_cache + at, new_key<T, D>(x, row, token, kv_head, position), x.key_scale);
    store_cached<T, D>(x.value_cache + at, new_value<T, D>(x, row, token, kv_head), x.value_scale);
}
