// Compute a request's emitted tokens from the winning tokens of its rows (reference/verify.py).
#pragma once
#include "stats.cuh"

// Positions of the requests in their texts (runtime/device/slot_state.py). Null pointers: not needed.
struct Progress {
    i64* length;
    i64* position;
    i64* newest;  // [batch, 2]

    // One warp; its lane i holds the i-th of `count` emitted tokens.
    __device__ __forceinline__ void advance(int request, i64 token, int count) const {
        i64 last = __shfl_sync(ALL_LANES, token, count - 1), previous = __shfl_sync(ALL_LANES, token, count - 2);
        if (!length || count == 0 || (threadIdx.x & 31)) return;
        i64* pair = newest + 2 * i64(request);
        pair[0] = count > 1 ? previous : pair[1];
        pair[1] = last;
        length[request] += count;
        position[request] += count;
    }
};

// One warp: lane i gets and writes the i-th of `rows` <= 32 tokens: the first `accepted` drafts, then `final` if it is
// a token, then -1.
__device__ __forceinline__ i64 emit(i64 draft, int rows, int accepted, int final, i64* tokens) {
    int lane = threadIdx.x & 31;
    i64 token = lane < accepted ? draft : lane == accepted ? final : -1;
    if (lane < rows) tokens[lane] = token;
    return token;
}

// The purpose of a row that samples from the target.
__device__ __forceinline__ u32 target_purpose(const Request& request, bool drafting) {
    return drafting && request.by_rejection ? DRAFT : SAMPLE;
}

// The winner among groups [first, last) of a row. `refused`: the rejection rule rejected the row's draft, so the
// residual decides. `empty` then reports that no token of this part has a residual, and the winner is of the target's
// own distribution. It counts only if that holds for every part.
template <class T>
__device__ __forceinline__ Contender part_winner(const Row<T>& row, const Request& request, const Distribution& dist,
                                                 const Drafts& drafts, int index, bool refused, u32 purpose, int first,
                                                 int last, const typename Row<T>::Incoming& next, bool& empty) {
    empty = false;
    if (!request.sampled) return greedy_part(row, first, last, next);
    Noise noise(request.seed, request.position + index, refused ? u32(RESIDUAL) : purpose);
    if (refused) {
        const float* proposed = dist.stats.drawn ? drafts.of_row(index, row.vocab) : nullptr;
        Contender best = draw_part(row, FromResidual(dist, proposed, drafts.tokens[index]), noise, first, last, next);
        if (best.token >= 0) return best;
        empty = true;
    }
    return draw_part(row, FromScores(dist), noise, first, last, next);
}
