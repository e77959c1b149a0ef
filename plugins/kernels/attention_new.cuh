// New keys and values on their way from the projection to the cache and to shared memory.
#pragma once

#include "attention_tile.cuh"

// A few new tokens per warp, all loaded before the first wait: warp w has tokens w, w + WARPS, … of those loaded.
template <class T, int D>
struct NewTokens {
    static constexpr int EACH = 2;

    int first;
    Head key[EACH], value[EACH];
    float2 cosine[EACH], sine[EACH], low_norm, high_norm;

    __device__ void load(const Operands<T>& x, int from, int start, int row, int kv_head) {
        int lane = threadIdx.x % 32;
        first = from + threadIdx.x / 32;
        Head norm = x.k_norm ? load_head<T, D>(x.k_norm) : Head{};
        low_norm = norm.low;
        high_norm = norm.high;
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            int token = min(first + i * WARPS, x.query - 1);
            i64 angle = static_cast<i64>(start + token) * (D / 2) + 2 * lane;
            key[i] = load_head<T, D>(x.projected(row, token, x.heads + kv_head, D));
            value[i] = load_head<T, D>(x.projected(row, token, x.heads + x.kv_heads + kv_head, D));
            cosine[i] = lane < D / 4 ? T::load2(x.cosine + angle) : make_float2(0, 0);
            sine[i] = lane < D / 4 ? T::load2(x.sine + angle) : make_float2(0, 0);
        }
    }

    // Tokens at positions of this block's steps, whose stages are being filled: range.index(step) is -1 for others.
    template <class Steps>
    __device__ void place(const Operands<T>& x, u16* stages, const Steps& range, Table table, int kv_head) {
        using Cached = typename T::Cached;
        constexpr int W = WIDTH<T, D>, VALUES = KEYS * W, EACH_CHUNK = 16 / sizeof(Cached);
        int lane = threadIdx.x % 32;
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            int token = first + i * WARPS, position = range.stored + token, line = position % KEYS;
            int stage = range.index(position / KEYS);
            if (stage < 0 || position >= range.end) continue;
            Head made = key[i];
            if (x.k_norm) {
                float norm = norm_of<D>(made, x.epsilon);
                made = {times(made.low, low_norm, norm), times(made.high, high_norm, norm)};
            }
            turn(made.low, made.high, cosine[i], sine[i]);
            i64 at = x.entry(table[position / x.block_size], kv_head, position) * D;
            store_cached<T, D>(x.key_cache + at, made, x.key_scale);
            store_cached<T, D>(x.value_cache + at, value[i], x.value_scale);
            if (lane >= D / 4) continue;
            u16* keys = stages + stage % STAGES * 2 * VALUES;
            auto place = [&](u16* tile, int column) {
                return reinterpret_cast<Cached*>(tile + swizzled<W>(line, column / EACH_CHUNK)) + column % EACH_CHUNK;
            };
            T::store_cached2(place(keys, 2 * lane), made.low, x.key_scale);
            T::store_cached2(place(keys, D / 2 + 2 * lane), made.high, x.key_scale);
            T::store_cached2(place(keys + VALUES, 2 * lane), value[i].low, x.value_scale);
            T::store_cached2(place(keys + VALUES, D / 2 + 2 * lane), value[i].high, x.value_scale);
        }
    }
};
