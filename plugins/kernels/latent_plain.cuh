// Latent attention one query at a time, without tensor cores: for float32, where exactness matters and speed does not.
#pragma once

#include "latent_call.cuh"

// One warp per token and head, grid (ceil(tokens * heads / 4)). A lane has every 32nd value of queries, keys and sums.
__device__ inline void attend_plainly(const LatentCall<Fp32>& x, float* mixed) {
    constexpr int KEY_PARTS = CACHED / 32, PAIRS = ROTATED / 2, FIRST = ROTATED / 32;
    static_assert(PAIRS == 32, "a lane has one pair");
    int unit = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (unit >= x.tokens * x.heads) return;
    int token = unit / x.heads, text = x.text_of(token);
    if (text < 0) return;
    i64 position = x.position_of(text, token);
    float query[KEY_PARTS], sum[KEY_PARTS - FIRST] = {}, largest = -INFINITE, weights = 0;
#pragma unroll
    for (int p = 0; p < KEY_PARTS; ++p) query[p] = x.query[static_cast<i64>(unit) * CACHED + lane + 32 * p];
    float cosine = x.cosine[position * PAIRS + lane], sine = x.sine[position * PAIRS + lane], low = query[0];
    query[0] = low * cosine - query[1] * sine;
    query[1] = query[1] * cosine + low * sine;
    for (int at = 0; at < x.bounded(position + 1); ++at) {
        const float* entry = x.entry(text, at) + lane;
        float key[KEY_PARTS], score = 0;
#pragma unroll
        for (int p = 0; p < KEY_PARTS; ++p) key[p] = entry[32 * p];
#pragma unroll
        for (int p = 0; p < KEY_PARTS; ++p) score += query[p] * key[p];
        for (int distance = 16; distance; distance /= 2) score += __shfl_xor_sync(0xffffffffu, score, distance);
        score *= x.scale;
        float raised = fmaxf(largest, score), keep = expf(largest - raised), weight = expf(score - raised);
#pragma unroll
        for (int p = FIRST; p < KEY_PARTS; ++p) sum[p - FIRST] = sum[p - FIRST] * keep + weight * key[p];
        weights = weights * keep + weight;
        largest = raised;
    }
#pragma unroll
    for (int p = 0; p < KEY_PARTS - FIRST; ++p) mixed[static_cast<i64>(unit) * RANK + lane + 32 * p] = sum[p] / weights;
}
