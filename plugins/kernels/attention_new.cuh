// New keys and values on their way from the projection to the cache and to shared memory.
#pragma once

#include "attention_tile.cuh"

// A few new tokens for each of a block's LOADING warps, all loaded before the first wait: warp w has tokens w,
// w + LOADING, … of those loaded. SMALL: in less code, which a warp's tokens run one after the other.
template <class T, int D, int LOADING = WARPS, bool SMALL = false>
struct NewTokens {
    static constexpr int ALL = 2 * WARPS, EACH = ALL / LOADING;
    static_assert(EACH <= 2);  // place chooses between a warp's first token and its last

    int first;
    Head<D> key[EACH], value[EACH], norm;
    Angles<T, D> angles[EACH];

    __device__ void load(const Operands<T>& x, int from, int start, int row, int kv_head) {
        first = from + threadIdx.x / 32;
        if (x.k_norm) norm = load_head<T, D>(x.k_norm);
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            int token = min(first + i * LOADING, x.query - 1);
            key[i] = load_head<T, D>(x.projected(row, token, x.heads + kv_head, D));
            value[i] = load_head<T, D>(x.projected(row, token, x.heads + x.kv_heads + kv_head, D));
            angles[i] = Angles<T, D>(x, start + token);
        }
    }

    // Tokens at positions of this block's steps, whose stages are being filled: range.index(step) is -1 for others.
    template <class Steps>
    __device__ void place(const Operands<T>& x, u16* stages, const Steps& range, Table table, int kv_head) {
        using Cached = typename T::Cached;
        constexpr int W = WIDTH<T, D>, VALUES = KEYS * W, EACH_CHUNK = 16 / sizeof(Cached), LAST = EACH - 1;
#pragma unroll(SMALL ? 1 : EACH)
        for (int i = 0; i < EACH; ++i) {
            int token = first + i * LOADING, position = range.stored + token, line = position % KEYS;
            int stage = range.index(position / KEYS);
            if (stage < 0 || position >= range.end) continue;
            Head<D> made = either(i == LAST, key[LAST], key[0]);
            if (x.k_norm) made = times(made, norm, norm_of<D>(made, x.epsilon));
            either(i == LAST, angles[LAST], angles[0]).turn_head(made);
            i64 at = x.entry(table[position / x.block_size], kv_head, position) * D;
            store_cached<T, D>(x.key_cache + at, made, x.key_scale);
            Head<D> cached = prepared_value<T, D>(either(i == LAST, value[LAST], value[0]), x);
            store_cached<T, D>(x.value_cache + at, cached, x.value_scale);
            u16* keys = stages + stage % STAGES * 2 * VALUES;
            auto place = [&](u16* tile, int column) {
                return reinterpret_cast<Cached*>(tile + swizzled<W>(line, column / EACH_CHUNK)) + column % EACH_CHUNK;
            };
#pragma unroll
            for (int p = 0; p < Head<D>::PARTS; ++p) {
                if (!Head<D>::has(p)) continue;
                int low = Head<D>::at(p), high = D / 2 + low;
                T::store_cached2(place(keys, low), made.low[p], x.key_scale);
                T::store_cached2(place(keys, high), made.high[p], x.key_scale);
                T::store_cached2(place(keys + VALUES, low), cached.low[p], x.value_scale);
                T::store_cached2(place(keys + VALUES, high), cached.high[p], x.value_scale);
            }
        }
    }
};
