// A linear recurrence over the tokens of runs, one after another: for a head with the state S [KD, value_dim],
//
//     S = decay * S, c = rate * (v - Sᵀ k) by the delta rule, else rate * v; out = Sᵀ q + (k · q) c + skip * v, S = S +
//     k cᵀ
//
// Every token goes through the same instructions in the same order, rounded in the same places, whether it is replayed,
// of a draft window or of a prompt, and the state is written as it is held. So a token has the same bits in any call.
//
// A block has some columns of one head, a warp COLUMNS of them, in registers.
#pragma once

#include "early.cuh"
#include "layout.cuh"
#include "runs.cuh"

constexpr int COLUMNS = 8;          // of a state's head, to a warp
constexpr int LANES = COLUMNS / 2;  // that hold the columns of a key, two each
constexpr int GROUPS = 32 / LANES;  // of a warp's lanes; group g has keys 4 (g + GROUPS i) to 4 (g + GROUPS i) + 3

__device__ inline float2 fused(float a, float2 x, float2 y) {
    return make_float2(fmaf(a, x.x, y.x), fmaf(a, x.y, y.y));
}
__device__ inline float2 product(float a, float2 x) { return make_float2(__fmul_rn(a, x.x), __fmul_rn(a, x.y)); }
__device__ inline float2 difference(float2 x, float2 y) {
    return make_float2(__fsub_rn(x.x, y.x), __fsub_rn(x.y, y.y));
}
__device__ inline float2 sum(float2 x, float2 y) { return make_float2(__fadd_rn(x.x, y.x), __fadd_rn(x.y, y.y)); }
__device__ inline float over_groups(float x) {
#pragma unroll
    for (int distance = LANES; distance < 32; distance *= 2)
        x = __fadd_rn(x, __shfl_xor_sync(0xffffffffu, x, distance));
    return x;
}
__device__ inline float2 over_groups(float2 x) { return make_float2(over_groups(x.x), over_groups(x.y)); }
__device__ inline float part_of(float4 x, int i) { return i == 0 ? x.x : i == 1 ? x.y : i == 2 ? x.z : x.w; }

// What a block of WARPS warps reads of a token.
template <class Kind, int WARPS>
struct Token {
    float4 query[Kind::KD / 4], key[Kind::KD / 4], decay[Kind::PER_CHANNEL ? Kind::KD / 4 : 1];
    float2 value[WARPS * COLUMNS / 2];
    float rate, key_query, unused[2];
};

// A lane's part of a state: two neighbouring columns of the keys `key(i)`; `column` is the first of them in the block.
template <class Kind>
struct State {
    static constexpr int KEYS = Kind::KD / GROUPS;
    float2 at[KEYS];
    int column;

    __device__ State() : column(threadIdx.x / 32 * COLUMNS + threadIdx.x % LANES * 2) {}
    __device__ static int key(int i) { return 4 * (threadIdx.x % 32 / LANES + GROUPS * (i / 4)) + i % 4; }
    __device__ void load(const float* from, int pitch, bool exists) {
#pragma unroll
        for (int i = 0; i < KEYS; ++i)
            at[i] = exists ? *reinterpret_cast<const float2*>(from + key(i) * pitch + column) : make_float2(0, 0);
    }
    __device__ void store(float* to, int pitch) const {
#pragma unroll
        for (int i = 0; i < KEYS; ++i) *reinterpret_cast<float2*>(to + key(i) * pitch + column) = at[i];
    }

    // Advance by a token; return its outputs if it is not replayed.
    template <class Read>
    __device__ float2 advance(const Read& token, float skip, bool replayed) {
        int group = threadIdx.x % 32 / LANES;
        float2 seen[2] = {}, out[2] = {}, value = token.value[column / 2];  // two sums each, for shorter chains
        float4 key[KEYS / 4];
#pragma unroll
        for (int i = 0; i < KEYS; ++i) {
            if (i % 4 == 0) key[i / 4] = token.key[group + GROUPS * (i / 4)];
            float decay = Kind::PER_CHANNEL ? part_of(token.decay[group + GROUPS * (i / 4)], i % 4) : token.decay[0].x;
            at[i] = product(decay, at[i]);
            if (Kind::DELTA) seen[i % 2] = fused(part_of(key[i / 4], i % 4), at[i], seen[i % 2]);
        }
        if (!replayed) {
#pragma unroll
            for (int i = 0; i < KEYS; ++i)
                out[i % 2] = fused(part_of(token.query[group + GROUPS * (i / 4)], i % 4), at[i], out[i % 2]);
            out[0] = over_groups(sum(out[0], out[1]));
        }
        float2 change =
            product(token.rate, Kind::DELTA ? difference(value, over_groups(sum(seen[0], seen[1]))) : value);
#pragma unroll
        for (int i = 0; i < KEYS; ++i) at[i] = fused(part_of(key[i / 4], i % 4), change, at[i]);
        return fused(skip, value, fused(token.key_query, change, out[0]));
    }
};
