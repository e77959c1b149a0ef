// The matmuls of experts: gate and up with their activation, and down. A format (experts_stream.cuh, low_bit.cuh) is
// how their weights are stored.
#pragma once
#include "early.cuh"
#include "experts_activation.cuh"
#include "experts_stream.cuh"

// Warps that share the inputs of 16 outputs (those of gates: Format::GATE_SPLIT), and outputs of a unit.
constexpr int DOWN_SPLIT = 4, DOWNS = 16 * WARPS / DOWN_SPLIT;
constexpr int TILES = ITEM_ROWS / 8;
template <class T>
constexpr int AT_ONCE = sizeof(typename T::Element) == 2 ? 2 : 1;  // blocks of a multiprocessor

// Partial sums of the warps for a unit, by warp, row and output; two, so that one is read while the other is written.
using Shared = float[2][WARPS][ITEM_ROWS][17];

template <class T>
__device__ __forceinline__ void keep(float (*to)[17], const Sums<T> (&sums)[TILES], int tiles) {
    int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) {
        if (tile >= tiles) break;
#pragma unroll
        for (int i = 0; i < 4; ++i) to[8 * tile + 2 * t + i % 2][g + 8 * (i / 2)] = sums[tile].at[i];
    }
}

// A unit's activations of `count` rows; ``factors``, ``biases``: of the output of a thread, the same for all of its
// rows.
template <class T, int SPLIT>
__device__ __forceinline__ void store_activated(const float (&shared)[WARPS][ITEM_ROWS][17], int mine, int count,
                                                float of_gate, float of_up, float2 biases,
                                                const Activation<T>& activation, typename T::Element* activated,
                                                int width) {
    constexpr int GATES = 8 * WARPS / SPLIT;
    for (int at = mine; at < GATES * count; at += THREADS) {
        int row = at / GATES, i = at % GATES, of = i / 8 * SPLIT;
        float gate = 0, up = 0;
#pragma unroll
        for (int w = 0; w < SPLIT; ++w) {
            gate += shared[of + w][row][i % 8];
            up += shared[of + w][row][i % 8 + 8];
        }
        float value = activation(gate * of_gate, up * of_up, biases);
        store1<T>(activated + static_cast<i64>(row) * width + i, value);
    }
}

// A unit's weighted outputs of an item's rows.
__device__ __forceinline__ void store_parts(const float (&shared)[WARPS][ITEM_ROWS][17], int mine, int4 item, int first,
                                            float factor, float bias, const int* order, const float* shares, int hidden,
                                            float* parts) {
    for (int at = mine; at < DOWNS * item.z; at += THREADS) {
        int row = at / DOWNS, output = at % DOWNS, of = output / 16 * DOWN_SPLIT;
        if (first + output >= hidden) continue;
        float sum = 0;
#pragma unroll
        for (int w = 0; w < DOWN_SPLIT; ++w) sum += shared[of + w][row][output % 16];
        int pair = order[item.y + row];
        parts[static_cast<i64>(pair) * hidden + first + output] = (sum * factor + bias) * shares[pair];
    }
}

// The place in an item of `count` pairs whose row a thread reads for place `place`: in formats that read whole tiles,
// the last one's for those that do not exist.
template <class Format>
__device__ __forceinline__ int row_place(int place, int count) {
    return Format::WHOLE_TILES ? min(place, count - 1) : place;
}

// A unit: GATES gates and the ups that belong to them, for activated[place of the pair].
template <class Format>
__device__ void gate_up(const typename Format::T::Element* x, const void* weight, Format format, const int* order,
                        const int4* items, const int* item_count, int hidden, int width, int per_token,
                        Activation<typename Format::T> activation, typename Format::T::Element* activated) {
    using T = typename Format::T;
    constexpr int EACH = 16 / sizeof(typename T::Element), SPLIT = Format::GATE_SPLIT, GATES = 8 * WARPS / SPLIT;
    extern __shared__ uint4 ring[];
    __shared__ Shared shared;
    wait_for_previous();
    begin_next();
    const uint4* stored = static_cast<const uint4*>(weight);
    int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), g = threadIdx.x % 32 / 4, across = width / GATES;
    int length = hidden / EACH, turn = 0;
    Units units(*item_count, across);
    auto expert_of = [=](int item) { return items[item].x; };
    auto outputs_of = [=](Unit unit, int expert) {
        int gate = activation.gate_row(expert, unit.place * GATES + warp / SPLIT * 8 + g, width);
        return Outputs{gate, gate + activation.step(width)};
    };
    Weights<Format, SPLIT, decltype(expert_of), decltype(outputs_of)> weights(expert_of, outputs_of, stored, hidden,
                                                                              warp % SPLIT, units, ring);
    auto row_of = [&](int4 item, int tile) {
        int place = row_place<Format>(8 * tile + g, item.z);
        i64 row = place < item.z ? order[item.y + place] / per_token : 0;
        return place < item.z ? reinterpret_cast<const uint4*>(x) + row * length : nullptr;
    };
    Unit unit = units.first();
    if (!units.there(unit)) return;
    int4 next = items[unit.item];
    const uint4* rows[TILES];
    auto find_others = [&] {  // those after the first tile; the last one of those that exist for those that do not
#pragma unroll
        for (int tile = 1; tile < TILES; ++tile) rows[tile] = 8 * tile < next.z ? row_of(next, tile) : rows[tile - 1];
    };
    rows[0] = row_of(next, 0);
    find_others();
    Ahead<Format> ahead;
    ahead.load(weights, rows[0], 0);
    int mine = THREADS - 1 - threadIdx.x;  // the last warps have the smallest parts of the inputs
    Scales<Format> scales(format, hidden);
    scales.load(outputs_of(unit, next.x), warp % SPLIT, SPLIT);
    for (; units.there(unit); turn ^= 1) {
        int4 item = next;
        Unit after = units.after(unit);
        Outputs outputs = outputs_of(unit, item.x), following = NONE;
        if (units.there(after)) {
            next = items[after.item];
            following = outputs_of(after, next.x);
            scales.prefetch(following, warp % SPLIT, SPLIT);
        }
        int first = unit.place * GATES, count = item.z, tiles = (count + 7) / 8;
        // Of the output of a thread, which is the same for all of its rows.
        int own = activation.gate_row(item.x, first + mine % GATES, width);
        float of_gate = format.factor(own), of_up = format.factor(own + activation.step(width));
        float2 biases = activation.biases(own, width);
        const uint4* next_row = row_of(next, 0);
        Sums<T> sums[TILES];
        multiply(weights, scales, outputs, following, rows, next_row, ahead, tiles, true, sums);
        rows[0] = next_row;
        find_others();  // early, so that nothing waits for them
        keep<T>(shared[turn][warp], sums, tiles);
        __syncthreads();
        store_activated<T, SPLIT>(shared[turn], mine, count, of_gate, of_up, biases, activation,
                                  activated + static_cast<i64>(item.y) * width + first, width);
        unit = after;
    }
}

// A unit: 32 outputs. parts[pair] = weight of the pair * (down(activated) + bias), if there is a bias.
template <class Format>
__device__ void down(const typename Format::T::Element* activated, const void* weight, Format format, const int* order,
                     const int4* items, const int* item_count, const float* shares, int hidden, int width,
                     const typename Format::T::Element* bias, float* parts) {
    using T = typename Format::T;
    constexpr int EACH = 16 / sizeof(typename T::Element);
    extern __shared__ uint4 ring[];
    __shared__ Shared shared;
    begin_next();
    const uint4* stored = static_cast<const uint4*>(weight);
    int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), g = threadIdx.x % 32 / 4, length = width / EACH;
    int turn = 0;
    Units units(load_count(item_count), (hidden + DOWNS - 1) / DOWNS);
    auto expert_of = [=](int item) { return load_item(items + item).x; };
    auto outputs_of = [=](Unit unit, int expert) {
        int own = unit.place * DOWNS + warp / DOWN_SPLIT * 16, output = expert * hidden + own + g;
        return own < hidden ? Outputs{output, output + 8} : NONE;
    };
    Weights<Format, DOWN_SPLIT, decltype(expert_of), decltype(outputs_of)> weights(expert_of, outputs_of, stored, width,
                                                                                   warp % DOWN_SPLIT, units, ring);
    wait_for_previous();
    auto row_of = [&](int4 item, int tile) {
        int place = row_place<Format>(8 * tile + g, item.z);
        i64 row = item.y + place;
        return place < item.z ? reinterpret_cast<const uint4*>(activated) + row * length : nullptr;
    };
    Unit unit = units.first();
    if (!units.there(unit)) return;
    int4 next = items[unit.item];
    Ahead<Format> ahead;
    ahead.load(weights, row_of(next, 0), 0);
    int mine = THREADS - 1 - threadIdx.x;  // the last warps have the smallest parts of the inputs
    Scales<Format> scales(format, width);
    scales.load(outputs_of(unit, next.x), warp % DOWN_SPLIT, DOWN_SPLIT);
    for (; units.there(unit); turn ^= 1) {
        int4 item = next;
        Unit after = units.after(unit);
        Outputs outputs = outputs_of(unit, item.x), following = NONE;
        if (units.there(after)) {
            next = items[after.item];
            following = outputs_of(after, next.x);
            scales.prefetch(following, warp % DOWN_SPLIT, DOWN_SPLIT);
        }
        int first = unit.place * DOWNS, count = item.z, tiles = (count + 7) / 8;
        // Of the output of a thread, which is the same for all of its rows.
        int own = item.x * hidden + min(first + mine % DOWNS, hidden - 1);
        float factor = format.factor(own), of_bias = load1_if<T>(bias, own);
        const uint4* rows[TILES];
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) rows[tile] = row_of(item, tile);
        Sums<T> sums[TILES];
        multiply(weights, scales, outputs, following, rows, row_of(next, 0), ahead, tiles, false, sums);
        keep<T>(shared[turn][warp], sums, tiles);
        __syncthreads();
        store_parts(shared[turn], mine, item, first, factor, of_bias, order, shares, hidden, parts);
        unit = after;
    }
}
