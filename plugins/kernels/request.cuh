// The arguments of one request, with the names of engines/contract/contract.py.
#pragma once
#include "draw.cuh"
#include "sampling.cuh"  // written by sampling_header.py

#define MEMBER(TYPE, NAME) TYPE NAME;
#define LOAD(TYPE, NAME) NAME(all.NAME[i]),
#define OR_ON(TYPE, NAME) || NAME > 0

// The sampling parameters of a request. A filter that keeps every token is 0.
struct Request {
    FOR_FILTERS(MEMBER)
    float temperature;
    u64 seed, position;
    bool sampled, by_rejection, filtered;

    __device__ __forceinline__ Request(const Sampling& all, int i, int vocab)
        : FOR_FILTERS(LOAD) temperature(all.temperature[i]), seed(u64(all.seed[i])), position(u64(all.position[i])) {
        sampled = temperature > 0.0f;
        by_rejection = sampled && all.rule[i] == 1;
        if (top_k >= vocab) top_k = 0;
        if (top_p >= 1.0f) top_p = 0.0f;
        filtered = sampled && (false FOR_FILTERS(OR_ON));
    }
};

// The drafts of one request. Without an array nothing was drafted.
struct Drafts {
    const i64* tokens;   // [rows - 1]
    const float* probs;  // [rows - 1, vocab] or null
    int length;

    __device__ __forceinline__ Drafts(const i64* all, const i64* lengths, const float* all_probs, int i, int rows,
                                      int vocab)
        : tokens(all + i64(i) * (rows - 1)), probs(all_probs ? all_probs + i64(i) * (rows - 1) * vocab : nullptr),
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
