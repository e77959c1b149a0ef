// Runs of tokens of a packed call of recurrent layers, and the tokens before them.
#pragma once

#include "elements.cuh"

// Run r of draft windows is slot r with `query` tokens; runs of prompts have `slots` and `starts`.
struct Runs {
    const i64* state_index;   // [runs], or null: there are no states
    const i64* write_index;   // [runs]
    const i64* commit_index;  // [runs], or null: all tokens of a run but the last
    const i64* slots;         // [runs], or null
    const int* starts;        // [runs + 1], or null
    int query, replays;       // `replays`: the most tokens that a call replays
};

struct Run {
    i64 slot, covered, index, commit;
    int first, count;

    __device__ Run(const Runs& runs, int run) {
        slot = runs.slots ? runs.slots[run] : run;
        first = runs.starts ? runs.starts[run] : run * runs.query;
        count = runs.starts ? runs.starts[run + 1] - first : runs.query;
        index = runs.write_index[run];
        i64 state = runs.state_index ? runs.state_index[run] : index;
        covered = max(min(state, index), index - runs.replays);  // of a free slot both are any numbers
        commit = runs.commit_index ? runs.commit_index[run] : index + count - 1;
    }
};

// The run of a token of the call, -1: padding.
__device__ inline int run_of(const Runs& runs, const int* run_of_token, int token) {
    return run_of_token ? run_of_token[token] : token / runs.query;
}

constexpr int MAX_KERNEL = 8;

// The tokens that a causal convolution reads, oldest first: rows of the ring or of the call; null before the text.
template <class T>
struct Taps {
    const typename T::Element* rows[MAX_KERNEL];
    bool recent[MAX_KERNEL];  // whether the row is one of the ring, whose columns have another order
};

// Find the row of tap `tap` for the token at `position`; rows have `width` values in the ring and `pitch` in the call.
template <class T>
__device__ void find_tap(Taps<T>& taps, int tap, const Run& run, i64 position, const typename T::Element* given,
                         int pitch, const typename T::Element* recent, int width, int history, int kernel) {
    i64 read = position - (kernel - 1) + tap;
    taps.recent[tap] = read < run.index;
    taps.rows[tap] = read < 0         ? nullptr
        : read < run.index ? recent + (run.slot * history + read % history) * width
                           : given + (run.first + read - run.index) * pitch;
}

// Two neighbouring values of the tokens that a convolution reads, by `value(row, recent)`, weighted and summed.
template <class T, class Value>
__device__ float2 convolved(const Taps<T>& taps, const typename T::Element* weight, const float* bias, int kernel,
                            int channel, Value value) {
    float2 sum = make_float2(bias[channel], bias[channel + 1]);
#pragma unroll
    for (int tap = 0; tap < MAX_KERNEL; ++tap) {
        if (tap >= kernel || !taps.rows[tap]) continue;
        float2 x = value(taps.rows[tap], taps.recent[tap]);
        sum.x = fmaf(x.x, T::load1(weight + channel * kernel + tap), sum.x);
        sum.y = fmaf(x.y, T::load1(weight + (channel + 1) * kernel + tap), sum.y);
    }
    return sum;
}
