// From the winners of a request's rows to what it emits (reference/verify.py).
#pragma once
#include "stats.cuh"

// Where the request stands in its text (runtime/slots.py). Null pointers: nobody asks.
struct Progress {
    i64* length;
    i64* last;
    i64* previous;

    // One thread. `emitted` are `count` tokens.
    __device__ __forceinline__ void advance(int request, const i64* emitted, int count) const {
        if (!length || count == 0) return;
        previous[request] = count > 1 ? emitted[count - 2] : last[request];
        last[request] = emitted[count - 1];
        length[request] += count;
    }
};

// One thread: write the first `accepted` drafts, `final` if it is a token, -1 behind them.
__device__ __forceinline__ int emit(const Drafts& drafts, int rows, int accepted, int final, i64* tokens) {
#pragma unroll 1
    for (int row = 0; row < rows; row++) tokens[row] = row < accepted ? drafts.tokens[row] : -1;
    if (final >= 0) tokens[accepted] = final;
    return accepted + (final >= 0);
}

// The purpose of a row that is drawn from the target.
__device__ __forceinline__ u32 target_purpose(const Request& request, bool drafting) {
    return drafting && request.by_rejection ? DRAFT : SAMPLE;
}

// The winner among groups [first, last) of a row. `refused`: it stands where the rejection rule refused a draft, so the
// residual decides; `empty` then says that no token of this part has one, and that the winner is of the target's own
// law, which counts only if that holds for every part.
template <class T>
__device__ __forceinline__ Best part_winner(const Row<T>& row, const Request& request, const Law& law,
                                            const Drafts& drafts, int index, bool refused, u32 purpose, int first,
                                            int last, bool& empty) {
    empty = false;
    if (!request.sampled) return greedy_part(row, first, last);
    Noise noise(request.seed, request.position + index, refused ? u32(RESIDUAL) : purpose);
    if (refused) {
        const float* proposed = law.stats.drawn ? drafts.law(index, row.vocab) : nullptr;
        Best best = draw_part(row, FromResidual(law, proposed, drafts.tokens[index]), noise, first, last);
        if (best.token >= 0) return best;
        empty = true;
    }
    return draw_part(row, FromScores(law), noise, first, last);
}
