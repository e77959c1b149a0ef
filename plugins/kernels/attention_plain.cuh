// Attention one query at a time, without tensor cores: for float32, where exactness matters and speed does not.
#pragma once

#include "attention_head.cuh"

// One warp per token and query head, grid (ceil(query * heads / 4), batch). New keys and values are in the cache.
template <class T, int D>
__device__ void attend_plainly(const Operands<T>& x, typename T::Element* mixed) {
    int unit = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    if (unit >= x.query * x.heads) return;
    int row = blockIdx.y, token = unit / x.heads, head = unit % x.heads, kv_head = head / (x.heads / x.kv_heads);
    int position = static_cast<int>(x.write_index[row]) + token;
    int begin = x.sliding_window && position >= x.sliding_window ? position - x.sliding_window + 1 : 0;
    Head query = prepared<T, D>(load_head<T, D>(x.projected(row, token, head, D)), x, x.q_norm, position);
    Head sum = {make_float2(0, 0), make_float2(0, 0)};
    float largest = -INFINITE, weights = 0;
    for (int at = begin; at < x.bounded(position + 1); ++at) {
        i64 entry = x.entry(x.block_of(row, at), kv_head, at) * D;
        Head key = load_head<T, D>(x.key_cache + entry), value = load_head<T, D>(x.value_cache + entry);
        float score = x.scale * warp_sum(query.low.x * key.low.x + query.low.y * key.low.y
                                         + query.high.x * key.high.x + query.high.y * key.high.y);
        float raised = fmaxf(largest, score), keep = expf(largest - raised), weight = expf(score - raised);
        sum.low = make_float2(sum.low.x * keep + weight * value.low.x, sum.low.y * keep + weight * value.low.y);
        sum.high = make_float2(sum.high.x * keep + weight * value.high.x, sum.high.y * keep + weight * value.high.y);
        weights = weights * keep + weight;
        largest = raised;
    }
    float2 one = make_float2(1, 1);
    Head result = {times(sum.low, one, 1 / weights), times(sum.high, one, 1 / weights)};
    store_head<T, D>(mixed + (static_cast<i64>(row * x.query + token) * x.heads + head) * D, result);
}
