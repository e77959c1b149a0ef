// Attention one query at a time, without tensor cores: for float32, where exactness matters and speed does not.
#pragma once

#include "attention_prompts.cuh"

// Attention of `query`, head `head` at `position` of `row` of the table; its key and value are in the cache.
template <class T, int D>
__device__ Head<D> seen_by(const Operands<T>& x, const Head<D>& query, int row, int head, int position) {
    int kv_head = head / (x.heads / x.kv_heads);
    int begin = x.sliding_window && position >= x.sliding_window ? position - x.sliding_window + 1 : 0;
    Head<D> sum = {};
    float largest = x.sinks ? x.sinks[head] : -INFINITE, weights = x.sinks ? 1 : 0;
    for (int at = begin; at < x.bounded(position + 1); ++at) {
        i64 entry = x.entry(x.block_of(row, at), kv_head, at) * D;
        Head<D> key = load_cached<T, D>(x.key_cache + entry), value = load_cached<T, D>(x.value_cache + entry);
        float products = 0;
#pragma unroll
        for (int p = 0; p < Head<D>::PARTS; ++p)
            products += query.low[p].x * key.low[p].x + query.low[p].y * key.low[p].y
                        + query.high[p].x * key.high[p].x + query.high[p].y * key.high[p].y;
        float score = x.scale * warp_sum(products);
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
    return times(times(sum, x.value_scale), 1 / weights);
}

// One warp per token and query head, grid (ceil(query * heads / 4), batch).
template <class T, int D>
__device__ void attend_plainly(const Operands<T>& x, typename T::Element* mixed) {
    int unit = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    if (unit >= x.query * x.heads) return;
    int row = blockIdx.y, token = unit / x.heads, head = unit % x.heads;
    int position = static_cast<int>(x.write_index[row]) + token;
    Head<D> query = prepared<T, D>(load_head<T, D>(x.projected(row, token, head, D)), x, x.q_norm, position);
    Head<D> result = seen_by<T, D>(x, query, row, head, position);
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
    Head<D> query = load_head<T, D>(x.qkv + static_cast<i64>(unit) * D);
    Head<D> result = seen_by<T, D>(x, query, run, head, position);
    store_head<T, D>(mixed + static_cast<i64>(unit) * D, result);
}
