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

// A token that a causal convolution reads: a row of the ring or of the call, null before the text.
template <class T>
struct Tap {
    const typename T::Element* row;
    bool recent;  // whether the row is one of the ring, whose columns have another order
};

// Find the token at `position` of a run's text; rows have `width` values in the ring and `pitch` in the call.
template <class T>
__device__ Tap<T> tap_at(i64 position, const Run& run, const typename T::Element* given, int pitch,
                         const typename T::Element* recent, int width, int history) {
    bool in_ring = position < run.index;
    return {position < 0 ? nullptr
            : in_ring    ? recent + (run.slot * history + position % history) * width
                         : given + (run.first + position - run.index) * pitch,
            in_ring};
}

// Two neighbouring values of the tokens that a convolution reads, oldest first, by `value(row, recent)`, weighted and
// summed.
template <class T, class Value>
__device__ float2 convolved(const Tap<T>* taps, const typename T::Element* weight, const float* bias, int kernel,
                            int channel, Value value) {
    float2 sum = make_float2(bias[channel], bias[channel + 1]);
    const auto *first = weight + channel * kernel, *second = first + kernel;
    auto add = [&](const Tap<T>& tap, float2 by) {
        float2 x = tap.row ? value(tap.row, tap.recent) : make_float2(0, 0);
        sum = make_float2(fmaf(x.x, by.x, sum.x), fmaf(x.y, by.y, sum.y));
    };
    if (kernel == 4) {  // of most models: read two weights at once
#pragma unroll
        for (int tap = 0; tap < 4; tap += 2) {
            float2 a = T::load2(first + tap), b = T::load2(second + tap);
            add(taps[tap], make_float2(a.x, b.x));
            add(taps[tap + 1], make_float2(a.y, b.y));
        }
        return sum;
    }
#pragma unroll 1
    for (int tap = 0; tap < kernel; ++tap) add(taps[tap], make_float2(T::load1(first + tap), T::load1(second + tap)));
    return sum;
}
