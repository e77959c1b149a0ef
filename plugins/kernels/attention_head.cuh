// Work on one head of one token before attention: norm, rotary embedding, its place in the cache.
#pragma once

#include "attention_cached.cuh"
#include "rotation.cuh"

template <class T>
struct Operands {
    using Element = typename T::Element;
    using Cached = typename T::Cached;

    const Element* qkv;  // [batch, query, heads + 2 * new_heads, D]
    Cached* key_cache;   // [blocks, kv_heads, block_size, D]
    Cached* value_cache;
    const int* block_table;  // [batch, max_blocks]
    const i64* write_index;  // [batch]
    const Element* cosine;   // [positions, D / 2]
    const Element* sine;
    const Element* q_norm;  // [D], or null: no norm
    const Element* k_norm;
    const float* sinks;  // [heads], or null: logits of every softmax that have no value
    int query, heads, kv_heads, block_size, max_blocks, sliding_window;
    int new_heads;   // of keys: kv_heads, or 0 in a layer that only reads the cache
    int value_norm;  // whether new values are normed
    float scale, epsilon;
    float key_scale, value_scale;  // divisors of the cached values; `scale` includes that of the keys

    __device__ const Element* projected(int row, int token, int head, int width) const {
        return qkv + (static_cast<i64>(row * query + token) * (heads + 2 * new_heads) + head) * width;
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

// One head held by a warp: part p of lane l has elements 2 (l + 32 p) and the next of either half, which rotate with
// each other, if the halves have so many.
template <int D>
struct Head {
    static constexpr int PARTS = (D + 127) / 128;

    float2 low[PARTS], high[PARTS];

    static __device__ int at(int part) { return 2 * (threadIdx.x % 32 + 32 * part); }
    static __device__ bool has(int part) { return at(part) < D / 2; }
};

__device__ inline float warp_sum(float x) {
    for (int distance = 16; distance; distance /= 2) x += __shfl_xor_sync(0xffffffffu, x, distance);
    return x;
}

// The softmax of a query over the keys that its warp has seen, one after the other, and the values that it weighs.
template <int D>
struct SeenKeys {
    Head<D> sum = {};
    float largest = -INFINITE, weights = 0;

    __device__ void see_sink(float logit) { largest = logit, weights = 1; }  // before any key
    __device__ void see(const Head<D>& query, const Head<D>& key, const Head<D>& value, float scale) {
        float products = 0;
#pragma unroll
        for (int p = 0; p < Head<D>::PARTS; ++p)
            products += query.low[p].x * key.low[p].x + query.low[p].y * key.low[p].y +
                        query.high[p].x * key.high[p].x + query.high[p].y * key.high[p].y;
        float score = scale * warp_sum(products);
        float raised = fmaxf(largest, score), keep = expf(largest - raised), weight = expf(score - raised);
#pragma unroll
        for (int p = 0; p < Head<D>::PARTS; ++p) {
            float2 low = value.low[p], high = value.high[p];
            sum.low[p] = make_float2(sum.low[p].x * keep + weight * low.x, sum.low[p].y * keep + weight * low.y);
            sum.high[p] = make_float2(sum.high[p].x * keep + weight * high.x, sum.high[p].y * keep + weight * high.y);
        }
        weights = weights * keep + weight;
        largest = raised;
    }
};

// Read a head: load2(i) gives elements i and i + 1.
template <int D, class Load2>
__device__ __forceinline__ Head<D> read_pairs(Load2 load2) {
    using H = Head<D>;
    H x;
#pragma unroll
    for (int p = 0; p < H::PARTS; ++p) {
        x.low[p] = H::has(p) ? load2(H::at(p)) : make_float2(0, 0);
        x.high[p] = H::has(p) ? load2(D / 2 + H::at(p)) : make_float2(0, 0);
    }
    return x;
}

// Write a head: store2(i, x) takes elements i and i + 1.
template <int D, class Store2>
__device__ __forceinline__ void write_pairs(const Head<D>& x, Store2 store2) {
    using H = Head<D>;
#pragma unroll
    for (int p = 0; p < H::PARTS; ++p) {
        if (!H::has(p)) continue;
        store2(H::at(p), x.low[p]);
        store2(D / 2 + H::at(p), x.high[p]);
    }
}

template <class T, int D>
__device__ Head<D> load_head(const typename T::Element* from) {
    return read_pairs<D>([&](int i) { return T::load2(from + i); });
}

template <class T, int D>
__device__ void store_head(typename T::Element* to, const Head<D>& x) {
    write_pairs(x, [&](int i, float2 pair) { T::store2(to + i, pair); });
}

// The cached form of a head: divided by the scale of the cache, and back.
template <class T, int D>
__device__ void store_cached(typename T::Cached* to, const Head<D>& x, float scale) {
    write_pairs(x, [&](int i, float2 pair) { T::store_cached2(to + i, pair, scale); });
}

template <class T, int D>
__device__ Head<D> load_cached(const typename T::Cached* from) {
    return read_pairs<D>([&](int i) { return T::load_cached2(from + i); });
}

__device__ inline float2 either(bool condition, float2 one, float2 other) {
    return make_float2(condition ? one.x : other.x, condition ? one.y : other.y);
}
__device__ inline float2 times(float2 a, float2 b, float c) { return make_float2(a.x * b.x * c, a.y * b.y * c); }

// Element by element, times `c`.
template <int D>
__device__ Head<D> times(const Head<D>& a, const Head<D>& b, float c) {
    Head<D> x;
#pragma unroll
    for (int p = 0; p < Head<D>::PARTS; ++p) {
        x.low[p] = times(a.low[p], b.low[p], c);
        x.high[p] = times(a.high[p], b.high[p], c);
    }
    return x;
}

template <int D>
__device__ Head<D> times(const Head<D>& a, float b) {
    Head<D> x;
    float2 both = make_float2(b, b);
#pragma unroll
    for (int p = 0; p < Head<D>::PARTS; ++p) {
        x.low[p] = times(a.low[p], both, 1);
        x.high[p] = times(a.high[p], both, 1);
    }
    return x;
}

// Cosine and sine for the pairs of a head at a position.
template <class T, int D>
struct Angles {
    float2 cosine[Head<D>::PARTS], sine[Head<D>::PARTS];

    __device__ Angles() {}
    __device__ Angles(const Operands<T>& x, i64 position) {
#pragma unroll
        for (int p = 0; p < Head<D>::PARTS; ++p) {
            i64 at = position * (D / 2) + Head<D>::at(p);
            cosine[p] = Head<D>::has(p) ? T::load2(x.cosine + at) : make_float2(0, 0);
            sine[p] = Head<D>::has(p) ? T::load2(x.sine + at) : make_float2(0, 0);
        }
    }
    __device__ void turn_head(Head<D>& x) const {
#pragma unroll
        for (int p = 0; p < Head<D>::PARTS; ++p) turn(x.low[p], x.high[p], cosine[p], sine[p]);
    }
};

// One of two heads, or of their angles, in registers: `condition ? one : other` of a structure takes addresses.
template <int D>
__device__ Head<D> either(bool condition, const Head<D>& one, const Head<D>& other) {
    Head<D> x;
#pragma unroll
    for (int p = 0; p < Head<D>::PARTS; ++p) {
        x.low[p] = either(condition, one.low[p], other.low[p]);
        x.high[p] = either(condition, one.high[p], other.high[p]);
    }
    return x;
}

template <class T, int D>
__device__ Angles<T, D> either(bool condition, const Angles<T, D>& one, const Angles<T, D>& other) {
    Angles<T, D> x;
#pragma unroll
    for (int p = 0; p < Head<D>::PARTS; ++p) {
        x.cosine[p] = either(condition, one.cosine[p], other.cosine[p]);
        x.sine[p] = either(condition, one.sine[p], other.sine[p]);
    }
    return x;
}

// The factor of RMS norm for a head, before its weight.
template <int D>
__device__ float norm_of(const Head<D>& x, float epsilon) {
    float squares = 0;
#pragma unroll
    for (int p = 0; p < Head<D>::PARTS; ++p) {
        float2 low = x.low[p], high = x.high[p];
        float part = low.x * low.x + low.y * low.y + high.x * high.x + high.y * high.y;
        squares = p ? squares + part : part;
    }
    return rsqrtf(warp_sum(squares) / D + epsilon);
}

// RMS norm (unless `weight` is null) and rotary embedding of a query or key at `position`, in float32.
template <class T, int D>
__device__ Head<D> prepared(Head<D> x, const Operands<T>& with, const typename T::Element* weight, int position) {
    if (weight) x = times(x, load_head<T, D>(weight), norm_of<D>(x, with.epsilon));
    Angles<T, D>(with, position).turn_head(x);
    return x;
}

template <class T, int D>
__device__ Head<D> new_key(const Operands<T>& x, int row, int token, int kv_head, int position) {
    Head<D> head = load_head<T, D>(x.projected(row, token, x.heads + kv_head, D));
    return prepared<T, D>(head, x, x.k_norm, position);
}

// A projected value as it is cached.
template <class T, int D>
__device__ Head<D> prepared_value(const Head<D>& value, const Operands<T>& x) {
    return x.value_norm ? times(value, norm_of<D>(value, x.epsilon)) : value;
}

template <class T, int D>
__device__ Head<D> new_value(const Operands<T>& x, int row, int token, int kv_head) {
    return prepared_value<T, D>(load_head<T, D>(x.projected(row, token, x.heads + x.kv_heads + kv_head, D)), x);
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
