// The arguments of one request, with the names of engines/contract/contract.py.
#pragma once
#include "draw.cuh"

struct Sampling {
    const float* temperature;
    const i64* top_k;
    const float* top_p;
    const float* min_p;
    const i64* seed;
    const i64* position;
    const i64* rule;
};

struct Request {
    float temperature, top_p, min_p;
    i64 top_k;
    u64 seed, position;
    bool sampled, by_rejection, filtered;

    __device__ __forceinline__ Request(const Sampling& all, int i, int vocab)
        : temperature(all.temperature[i]), top_p(all.top_p[i]), min_p(all.min_p[i]), top_k(all.top_k[i]),
          seed(u64(all.seed[i])), position(u64(all.position[i])) {
        sampled = temperature > 0.0f;
        by_rejection = sampled && all.rule[i] == 1;
        if (top_k <= 0 || top_k >= vocab) top_k = 0;
        if (!(top_p > 0.0f && top_p < 1.0f)) top_p = 0.0f;
        filtered = sampled && (top_k > 0 || top_p > 0.0f || min_p > 0.0f);
    }
};

// The drafts of one request. Without an array nothing was drafted.
struct Drafts {
    const i64* tokens;   // [rows - 1]
    const float* probs;  // [rows - 1, vocab] or null
    int length;

    __device__ __forceinline__ Drafts(const i64* all, const i64* lengths, const float* all_probs, int i, int rows,
                                      int vocab)
        : tokens(all + i64(i) * (rows - 1)),
          probs(all_probs ? all_probs + i64(i) * (rows - 1) * vocab : nullptr),
          length(lengths ? int(lengths[i]) : 0) {}

    // A warp: its lane i gets the i-th draft, or -1 past the last.
    __device__ __forceinline__ i64 of_lane() const {
        int lane = threadIdx.x & 31;
        return lane < length ? tokens[lane] : -1;
    }

    __device__ __forceinline__ const float* of_row(int row, int vocab) const {
        return probs ? probs + i64(row) * vocab : nullptr;
    }
};
