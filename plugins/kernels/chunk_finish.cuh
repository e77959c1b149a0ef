// Outputs of prompts whose heads have 128 values each: `finish` of linear_attention.cu with several tokens at a time.
#pragma once

#include "convolution.cuh"
#include "early.cuh"

constexpr int FINISHED_HEAD = 128;                      // values of a head
constexpr int FINISHED_TOKENS = 4, FINISHED_HEADS = 8;  // of a block: each warp has the tokens of a head

// Norm the outputs of tokens, head by head, and gate them; copy the newest tokens of each run to the ring. Grid (tiles
// of FINISHED_TOKENS, then tokens of the ring of each run; ceil(heads / FINISHED_HEADS)), 32 FINISHED_HEADS threads.
template <class T, class Kind>
__device__ void finish_heads(const float* mixtures, const typename T::Element* given, const float* weight,
                             const int* run_of_token, const Runs& runs, int tokens, const Layout<Kind>& layout,
                             int history, int gate_is_sigmoid, float epsilon, typename T::Element* recent,
                             typename T::Element* out) {
    begin_next();
    int tiles = (tokens + FINISHED_TOKENS - 1) / FINISHED_TOKENS, tile = blockIdx.x;
    if (tile >= tiles) {
        Run run(runs, (tile - tiles) / history);
        int token = run.count - 1 - (tile - tiles) % history;
        if (token < 0) return;
        const auto* from = given + static_cast<i64>(run.first + token) * layout.given_pitch;
        auto* to = recent + (run.slot * history + (run.index + token) % history) * layout.width();
        wait_for_previous();  // `convolve` reads the ring
        for (int i = blockIdx.y * blockDim.x + threadIdx.x; i < layout.width(); i += gridDim.y * blockDim.x)
            to[i] = from[layout.given_column(i)];
        return;
    }
    int head = blockIdx.y * FINISHED_HEADS + threadIdx.x / 32, at = 4 * (threadIdx.x % 32),
        first = FINISHED_TOKENS * tile;
    if (head >= layout.value_heads) return;
    int gate = layout.given_at(GATE, layout.shared() * FINISHED_HEAD, head * FINISHED_HEAD + at);
    float4 factors = *reinterpret_cast<const float4*>(weight + at), x[FINISHED_TOKENS];
    uint2 gates[FINISHED_TOKENS];
    bool there[FINISHED_TOKENS];
#pragma unroll
    for (int j = 0; j < FINISHED_TOKENS; ++j) {
        int token = first + j;
        there[j] = token < tokens && run_of(runs, run_of_token, token) >= 0;  // else padding
        if (there[j])
            gates[j] = *reinterpret_cast<const uint2*>(given + static_cast<i64>(token) * layout.given_pitch + gate);
    }
    wait_for_previous();
    i64 place = static_cast<i64>(first) * layout.values() + head * FINISHED_HEAD + at;
#pragma unroll
    for (int j = 0; j < FINISHED_TOKENS; ++j)
        if (there[j]) x[j] = *reinterpret_cast<const float4*>(mixtures + place + static_cast<i64>(j) * layout.values());
#pragma unroll
    for (int j = 0; j < FINISHED_TOKENS; ++j) {
        if (!there[j]) continue;
        float4 y = x[j];
        float squares = sum_of_warp(fmaf(y.x, y.x, fmaf(y.y, y.y, fmaf(y.z, y.z, y.w * y.w))));
        float scale = rsqrtf(squares / FINISHED_HEAD + epsilon);
        auto open = [&](float2 z) {
            float2 share = make_float2(__fdividef(1, 1 + __expf(-z.x)), __fdividef(1, 1 + __expf(-z.y)));
            return gate_is_sigmoid ? share : make_float2(z.x * share.x, z.y * share.y);
        };
        float2 low = open(T::unpack(gates[j].x)), high = open(T::unpack(gates[j].y));
        uint2 bits =
            make_uint2(T::pack(make_float2(y.x * scale * factors.x * low.x, y.y * scale * factors.y * low.y)),
                       T::pack(make_float2(y.z * scale * factors.z * high.x, y.w * scale * factors.w * high.y)));
        *reinterpret_cast<uint2*>(out + place + static_cast<i64>(j) * layout.values()) = bits;
    }
}
