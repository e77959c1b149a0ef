// Attention one query at a time, without tensor cores: for float32, where exactness matters and speed does not.
#pragma once

#include "attention_prompts.cuh"

// Attention of `query`, head `head` at `position` of `row` of the table; its key and value are in the cache, and those
// of `later` positions that it sees, too.
template <class T, int D>
__device__ Head<D> seen_by(const Operands<T>& x, const Head<D>& query, int row, int head, int position, int later = 0) {
    int kv_head = head / (x.heads / x.kv_heads);
    int begin = x.sliding_window && position >= x.sliding_window ? position - x.sliding_window + 1 : 0;
    SeenKeys<D> seen;
    if (x.sinks) seen.see_sink(x.sinks[head]);
    for (int at = begin; at < x.bounded(position + later + 1); ++at) {
        i64 entry = x.entry(x.block_of(row, at), kv_head, at) * D;
        Head<D> key = load_cached<T, D>(x.key_cache + entry), value = load_cached<T, D>(x.value_cache + entry);
        seen.see(query, key, value, x.scale);
    }
    return times(times(seen.sum, x.value_scale), 1 / seen.weights);
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
template <class T, int D, class Images = Causal>
__device__ void attend_all_plainly(const Operands<T>& x, Runs runs, typename T::Element* mixed, Images images = {}) {
    int unit = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    if (unit >= x.query * x.heads) return;
    int token = unit / x.heads, head = unit % x.heads, run = runs.rows[token];
    if (run < 0) return;
    int position = static_cast<int>(runs.position(x, run, token));
    Head<D> query = load_head<T, D>(x.qkv + static_cast<i64>(unit) * D);
    Head<D> result = seen_by<T, D>(x, query, run, head, position, images.later(token, position));
    store_head<T, D>(mixed + static_cast<i64>(unit) * D, result);
}
