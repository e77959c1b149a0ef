// Rows of prompts that are processed in chunks (chunk_rows.cuh): the convolution of queries, keys and values, their
// norms, decays and rates. A warp reads each token once, and keeps those before it in registers.
#pragma once

#include "chunk_rows.cuh"
#include "convolution.cuh"
#include "early.cuh"

constexpr int TAPS = 4;         // tokens that the convolution reads
constexpr int TILE_TOKENS = 8;  // of a block
constexpr int JOB_COLUMNS = 128;

// Neighbouring rows of the workspace, which a block computes: tokens of the call, or those that a run replays. Lane
// 3 i + k has the place of tap k of token i, lane OWN + i the place of token i itself.
template <class T, class Kind>
struct TokenTile {
    static constexpr int OWN = TILE_TOKENS * (TAPS - 1);
    static_assert(OWN + TILE_TOKENS == 32, "a lane for each place");
    Tap<T> tap;
    int run;      // of the token of this lane, or -1
    u32 in_ring;  // the lanes whose taps are rows of the ring
    i64 row;      // of the first token in the workspace
    bool replayed;

    __device__ TokenTile(const typename T::Element* given, const typename T::Element* recent, const Runs& runs,
                         const int* run_of_token, int count, int tokens, const Layout<Kind>& layout, int history)
        : tap{nullptr, false}, run(-1) {
        int of_run = (runs.replays + TILE_TOKENS - 1) / TILE_TOKENS, tile = blockIdx.x, lane = threadIdx.x % 32;
        replayed = tile < of_run * count;
        int number = replayed ? tile / of_run : 0;
        int first = TILE_TOKENS * (replayed ? tile % of_run : tile - of_run * count);
        row = first + static_cast<i64>(replayed ? number : count) * runs.replays;
        int token = first + (lane < OWN ? lane / (TAPS - 1) : lane - OWN), before = lane < OWN ? 3 - lane % 3 : 0;
        if (token < (replayed ? runs.replays : tokens)) {
            if (!replayed) number = run_of(runs, run_of_token, token);
            if (number >= 0) {
                Run own(runs, number);
                i64 position = own.index + token - (replayed ? runs.replays : own.first);
                if (own.count && position >= own.covered) {
                    run = number;
                    tap = tap_at<T>(position - before, own, given, layout.given_pitch, recent, layout.width(), history);
                }
            }
        }
        in_ring = __ballot_sync(0xffffffffu, tap.recent);
    }
    __device__ int run_of_token(int token) const { return __shfl_sync(0xffffffffu, run, OWN + token); }
    __device__ Tap<T> tap_of(int lane) const {
        auto address = __shfl_sync(0xffffffffu, reinterpret_cast<u64>(tap.row), lane);
        return {reinterpret_cast<const typename T::Element*>(address), (in_ring >> lane & 1) != 0};
    }
    __device__ Tap<T> own(int token) const { return tap_of(OWN + token); }
};

// Two pairs of neighbouring columns of a lane: where they are in the ring and as projected, their weights and biases.
template <class T>
struct Filter {
    int ring[2], given[2];
    bool exists[2];
    float2 by[TAPS][2], bias[2];

    __device__ void load(const Weights<T>& weights) {
#pragma unroll
        for (int p = 0; p < 2; ++p) {
            uint4 w = make_uint4(0, 0, 0, 0);  // four weights of each column
            bias[p] = make_float2(0, 0);
            if (exists[p]) {
                w = *reinterpret_cast<const uint4*>(weights.convolution + TAPS * ring[p]);
                bias[p] = *reinterpret_cast<const float2*>(weights.bias + ring[p]);
            }
            float2 first[2] = {T::unpack(w.x), T::unpack(w.y)}, second[2] = {T::unpack(w.z), T::unpack(w.w)};
            by[0][p] = make_float2(first[0].x, second[0].x), by[1][p] = make_float2(first[0].y, second[0].y);
            by[2][p] = make_float2(first[1].x, second[1].x), by[3][p] = make_float2(first[1].y, second[1].y);
        }
    }
    __device__ u32 values(const Tap<T>& tap, int p) const {
        return tap.row && exists[p] ? two(tap.row + (tap.recent ? ring[p] : given[p])) : 0;
    }

    // Convolve the columns of each token of a tile; use(token, pairs) takes the results, with the whole warp.
    template <class Kind, class Use>
    __device__ void convolve(const TokenTile<T, Kind>& tile, Use use) const {
        u32 own[TILE_TOKENS][2];
#pragma unroll
        for (int i = 0; i < TILE_TOKENS; ++i) {
            Tap<T> tap = tile.own(i);
#pragma unroll
            for (int p = 0; p < 2; ++p) own[i][p] = values(tap, p);
        }
        float2 before[TAPS - 1][2];
        int previous = -1;
#pragma unroll
        for (int i = 0; i < TILE_TOKENS; ++i) {
            int number = tile.run_of_token(i);
            if (number < 0) continue;
            if (number != previous) {
                previous = number;
#pragma unroll
                for (int k = 0; k < TAPS - 1; ++k) {
                    Tap<T> tap = tile.tap_of((TAPS - 1) * i + k);
#pragma unroll
                    for (int p = 0; p < 2; ++p) before[k][p] = T::unpack(values(tap, p));
                }
            }
            float2 sums[2];
#pragma unroll
            for (int p = 0; p < 2; ++p) {
                float2 x = T::unpack(own[i][p]), sum = bias[p];
#pragma unroll
                for (int k = 0; k < TAPS; ++k) {
                    float2 tap = k < TAPS - 1 ? before[k][p] : x;
                    sum = make_float2(fmaf(tap.x, by[k][p].x, sum.x), fmaf(tap.y, by[k][p].y, sum.y));
                }
                before[0][p] = before[1][p], before[1][p] = before[2][p], before[2][p] = x;
                sums[p] = make_float2(__fdividef(sum.x, 1 + __expf(-sum.x)), __fdividef(sum.y, 1 + __expf(-sum.y)));
            }
            use(i, sums);
        }
    }
};

// Grid (tiles, ceil(jobs / 4)), 128 threads. A warp has 128 columns of a tile, or decays and rates of 32 heads.
template <class T, class Kind>
__device__ void convolve_chunks(const typename T::Element* given, const typename T::Element* recent,
                                const Weights<T>& weights, const Runs& runs, const int* run_of_token, int count,
                                int tokens, const Layout<Kind>& layout, int history, u8* rows) {
    static_assert(Kind::KD == JOB_COLUMNS, "a warp norms a key");
    ChunkRow<Kind> parts(layout);
    int lane = threadIdx.x % 32, job = blockIdx.y * 4 + threadIdx.x / 32, pitch = parts.pitch();
    int of_values = job - 2 * layout.key_heads,
        of_gates = of_values - (layout.values() + JOB_COLUMNS - 1) / JOB_COLUMNS;
    bool query = job < layout.key_heads;
    Part queries = layout.given[QUERY], keys = layout.given[KEY];
    Filter<T> filter;
    int to_column;  // bytes into a row
#pragma unroll
    for (int p = 0; p < 2; ++p) {
        int at = 64 * p + 2 * lane;
        if (of_values < 0) {
            int head = query ? job : job - layout.key_heads;
            to_column = (query ? parts.query() : parts.key()) + 2 * head * JOB_COLUMNS;
            filter.ring[p] = (query ? layout.ring_query() : layout.ring_key()) + head * JOB_COLUMNS + at;
            filter.given[p] = at + (query ? queries.first + head * queries.stride : keys.first + head * keys.stride);
            filter.exists[p] = true;
        } else {
            int value = JOB_COLUMNS * of_values + at;
            to_column = parts.value() + 2 * JOB_COLUMNS * of_values;
            filter.ring[p] = layout.ring_value() + value;
            filter.given[p] = layout.given_at(VALUE, layout.shared() * layout.value_dim, value);
            filter.exists[p] = value < layout.values();
        }
    }
    filter.load(weights);
    wait_for_previous();
    begin_next();  // now all kernels before the previous one are complete, so the next two may read what they wrote
    TokenTile<T, Kind> tile(given, recent, runs, run_of_token, count, tokens, layout, history);
    u8* to = rows + tile.row * pitch;
    auto store = [&](int token, int p, u32 bits) {
        *reinterpret_cast<u32*>(to + static_cast<i64>(token) * pitch + to_column + 2 * (64 * p + 2 * lane)) = bits;
    };
    if (of_values < 0) {
        float scale = query ? rsqrtf(JOB_COLUMNS) : 1;
        filter.convolve(tile, [&](int token, const float2(&x)[2]) {
            float squares = fmaf(x[0].x, x[0].x, fmaf(x[0].y, x[0].y, fmaf(x[1].x, x[1].x, x[1].y * x[1].y)));
            float by = scale * rsqrtf(sum_of_warp(squares) + 1e-6f);
#pragma unroll
            for (int p = 0; p < 2; ++p) store(token, p, Fp16::pack(make_float2(by * x[p].x, by * x[p].y)));
        });
    } else if (of_gates < 0) {
        filter.convolve(tile, [&](int token, const float2(&x)[2]) {
#pragma unroll
            for (int p = 0; p < 2; ++p)
                if (filter.exists[p]) store(token, p, T::pack(x[p]));
        });
    } else {
        int head = 32 * of_gates + lane;
        bool there = head < layout.value_heads;
        int decay = tile.replayed ? layout.ring_decay() + head : layout.given_at(DECAY, layout.shared(), head);
        int update = tile.replayed ? layout.ring_update() + head : layout.given_at(UPDATE, layout.shared(), head);
#pragma unroll 1
        for (int i = 0; i < TILE_TOKENS; ++i) {
            Tap<T> tap = tile.own(i);
            if (!tap.row || !there) continue;
            float x = T::load1(tap.row + decay) + weights.dt_bias[head], step = x > 20 ? x : log1pf(expf(x));
            auto* numbers = reinterpret_cast<float*>(to + static_cast<i64>(i) * pitch + parts.log_decay());
            numbers[head] = fmaxf(weights.decay_scale[head] * step, -100.0f);
            numbers[layout.value_heads + head] = weights.update_scale * sigmoid(T::load1(tap.row + update));
        }
    }
}
