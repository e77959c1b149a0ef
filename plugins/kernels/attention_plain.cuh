// Attention one query at a time, without tensor cores: for float32, where exactness matters and speed does not.
#pragma once

#include "attention_prompts.cuh"

// Attention of `query`, a head at `position` of `row` of the table; its key and value are in the cache.
template <class T, int D>
__device__ Head seen_by(const Operands<T>& x, Head query, int row, int kv_head, int position) {
    int begin = x.sliding_window && position >= x.sliding_window ? position - x.sliding_window + 1 : 0;
    Head sum = {make_float2(0, 0), make_float2(0, 0)};
    float largest = -INFINITE, weights = 0;
    for (int at = begin; at < x.bounded(position + 1); ++at) {
        i64 entry = x.entry(x.block_of(row, at), kv_head, at) * D;
        Head key = load_cached<T, D>(x.key_cache + entry), value = load_cached<T, D>(x.value_cache + entry);
        float score = x.scale * warp_sum(query.low.x * key.low.x + query.low.y * key.low.y
                                         + query.high.x * key.high.x + query.high.y * key.high.y);
        float raised = fmaxf(largest, score), keep = expf(largest - raised), weight = expf(score - raised);
        sum.low = make_float2(sum.low.x * keep + weight * value.low.x, sum.low.y * keep + weight * value.low.y);
        sum.high = make_float2(sum.high.x * keep + weight * value.high.x, sum.high.y * keep + weight * value.high.y);
        weights = weights * keep + weight;
        largest = raised;
    }
    float2 by = make_float2(x.value_scale, x.value_scale);
    return {times(sum.low, by, 1 / weights), times(sum.high, by, 1 / weights)};
}

// One warp per token and query head, grid (ceil(query * heads / 4), batch).
template <class T, int D>
__device__ void attend_plainly(const Operands<T>& x, typename T::Element* mixed) {
    int unit = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    if (unit >= x.query * x.heads) return;
    int row = blockIdx.y, token = unit / x.heads, head = unit % x.heads, kv_head = head / (x.heads / x.kv_heads);
    int position = static_cast<int>(x.write_index[row]) + token;
    Head query = prepared<T, D>(load_head<T, D>(x.projected(row, token, head, D)), x, x.q_norm, position);
    Head result = seen_by<T, D>(x, query, row, kv_head, position);
    store_head<T, D>(mixed + (static_cast<i64>(row * x.query + token) * x.heads + head) * D, result);
}

// The same for prepared queries of prompt runs, x.qkv [x.query tokens, heads, D], grid (ceil(query * heads / 4)).
template <class T, int D>
__device__ void attend_all_plainly(const Operands<T>& x, Runs runs, typename T::Element* mixed) {
    int unit = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    if (unit >= x.query * x.heads) return;
    int token = unit / x.heads, head = unit % x.heads, run = runs.rows[token];
    if (run < 0) return;
    int position = static_cast<int>(runs.position(x, run, token));
    Head query = load_head<T, D>(x.qkv + static_cast<i64>(unit) * D);
    Head result = seen_by<T, D>(x, query, run, head / (x.heads / x.kv_heads), position);
    store_head<T, D>(mixed + static_cast<i64>(unit) * D, result);
}
