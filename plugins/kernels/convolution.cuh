// What the recurrence of a linear attention layer reads of a token: queries and keys, values, decays and rates, from
// the projected values of the token and of those before it. The same bits for prompts and for draft windows.
#pragma once

#include "layout.cuh"
#include "runs.cuh"

__device__ inline float sum_of_warp(float x) {
    for (int distance = 16; distance; distance /= 2) x = __fadd_rn(x, __shfl_xor_sync(0xffffffffu, x, distance));
    return x;
}

__device__ inline float sigmoid(float x) { return __fdiv_rn(1.0f, __fadd_rn(1.0f, expf(-x))); }

__device__ inline float2 silu(float2 x) {
    return make_float2(__fmul_rn(x.x, sigmoid(x.x)), __fmul_rn(x.y, sigmoid(x.y)));
}

// The weights of a layer between its projections and the recurrence.
template <class T>
struct Weights {
    const typename T::Element* convolution;
    const float *bias, *decay_scale, *dt_bias;
    int kernel;
    float update_scale;
};

// A token: `taps` are the tokens that its convolution reads, itself last.
template <class T, class Kind>
struct Projected {
    const Tap<T>* taps;
    const Weights<T>& weights;
    const Layout<Kind>& layout;

    // Two channels, which lie in the ring in the order of the weights.
    __device__ float2 convolve(int in_ring, int in_given) const {
        auto load = [&](const typename T::Element* row, bool recent) {
            return T::load2(row + (recent ? in_ring : in_given));
        };
        return silu(convolved(taps, weights.convolution, weights.bias, weights.kernel, in_ring, load));
    }

    // Query and key of a head, and their product, by one warp. Of a token that is replayed the key alone.
    __device__ void keys(int head, bool replayed, float* query, float* key, float* key_query) const {
        constexpr int KD = Kind::KD, PAIRS = (KD + 63) / 64;
        int lane = threadIdx.x % 32;
        auto vector = [&](int part, int ring, float* to, float2(&x)[PAIRS]) {
            int in_ring = ring + head * KD, in_given = layout.given[part].first + head * layout.given[part].stride;
            float squares = 0;
#pragma unroll
            for (int i = 0; i < PAIRS; ++i) {
                int at = 64 * i + 2 * lane;
                x[i] = at < KD ? convolve(in_ring + at, in_given + at) : make_float2(0, 0);
                squares = fmaf(x[i].x, x[i].x, fmaf(x[i].y, x[i].y, squares));
            }
            // By the delta rule both are unit vectors, and the query is divided by the root of its size.
            float by = Kind::DELTA ? rsqrtf(sum_of_warp(squares) + 1e-6f) : 1;
            if (Kind::DELTA && part == QUERY) by = __fmul_rn(rsqrtf(KD), by);
#pragma unroll
            for (int i = 0; i < PAIRS; ++i) {
                int at = 64 * i + 2 * lane;
                x[i] = make_float2(__fmul_rn(by, x[i].x), __fmul_rn(by, x[i].y));
                if (at < KD) *reinterpret_cast<float2*>(to + at) = x[i];
            }
        };
        float2 k[PAIRS], q[PAIRS];
        vector(KEY, layout.ring_key(), key, k);
        if (replayed) return;
        vector(QUERY, layout.ring_query(), query, q);
        float dot = 0;
#pragma unroll
        for (int i = 0; i < PAIRS; ++i) dot = fmaf(q[i].x, k[i].x, fmaf(q[i].y, k[i].y, dot));
        dot = sum_of_warp(dot);
        if (lane == 0) *key_query = dot;
    }

    // Values `at` and `at` + 1 of all heads.
    __device__ float2 values(int at) const {
        return convolve(layout.ring_value() + at, layout.given_at(VALUE, layout.shared() * layout.value_dim, at));
    }

    __device__ float logit(int part, int each, int ring, int at) const {
        const Tap<T>& own = taps[weights.kernel - 1];
        return T::load1(own.row + (own.recent ? ring + at : layout.given_at(part, each, at)));
    }
    __device__ float step(int decay) const {
        float x = logit(DECAY, layout.shared() * Kind::DECAYS, layout.ring_decay(), decay) + weights.dt_bias[decay];
        return x > 20 ? x : log1pf(expf(x));
    }
    __device__ float decay(int decay, float step) const {
        return expf(__fmul_rn(weights.decay_scale[decay / Kind::DECAYS], step));
    }
    __device__ float rate(int head) const {  // by the delta rule; else the step
        return __fmul_rn(weights.update_scale, sigmoid(logit(UPDATE, layout.shared(), layout.ring_update(), head)));
    }
};
