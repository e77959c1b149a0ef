// New keys and values on their way from the projection to the cache and to shared memory.
#pragma once

#include "attention_tile.cuh"

// A few new tokens per warp, all loaded before any is waited for: warp w has w, w + WARPS, … of those that are loaded.
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

    // Those at positions of this block's steps, whose stages are being filled.
    __device__ void place(const Operands<T>& x, u16* stages, Range range, Table table, int kv_head) {
        constexpr int VALUES = KEYS * D;
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
            store_head<T, D>(x.key_cache + at, made);
            store_head<T, D>(x.value_cache + at, value[i]);
            if (lane >= D / 4) continue;
            u16* keys = stages + stage % STAGES * 2 * VALUES;
            int low = swizzled<D>(line, lane / 4) + 2 * (lane % 4);
            int high = swizzled<D>(line, D / 16 + lane / 4) + 2 * (lane % 4);
            T::store2(keys + low, made.low);
            T::store2(keys + high, made.high);
            T::store2(keys + VALUES + low, value[i].low);
            T::store2(keys + VALUES + high, value[i].high);
        }
    }
};
