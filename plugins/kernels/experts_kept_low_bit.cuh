// Experts with weights of 4 or 8 bits whose rows are kept, with the bits of those that stream them: sums of every
// fourth chunk of inputs are apart, in one warp.
#pragma once
#include "experts_kept.cuh"
#include "experts_low_bit.cuh"

template <class Format>
struct LowBitParts {
    using T = typename Format::T;
    static constexpr int TILES = 2;  // of rows, at most
    static constexpr int LOADS = Format::LOADS, GROUPS = 4 / LOADS, PARTS = 2 / LOADS, SPLIT = DOWN_SPLIT;
    static constexpr int AT_ONCE = SPLIT / PARTS;  // lines, each of which has chunks of other parts
    static_assert(Streamed<Format>::GATE_SPLIT == SPLIT);
    Streamed<Format> format;
    int scale_inputs;  // of an output

    __device__ __forceinline__ int row_bytes(int inner) const { return 16 * format.vectors(inner); }
    // The scales of a row, at most 128 bytes at a time, into the second-level cache.
    __device__ __forceinline__ void prefetch(int row) const {
        constexpr int EACH = 128 / sizeof(typename Format::Scale);
        int stored = format.stored(scale_inputs);
        const auto* scales = format.scales + static_cast<i64>(row) * stored;
#pragma unroll 1
        for (int at = 0; at < stored; at += EACH) Scales<Streamed<Format>>::prefetched(scales + at);
    }
    // Vectors from one kept row to the next, so that two rows which are read at once use different banks.
    static __device__ __forceinline__ int kept_pitch(int inner) { return CHUNK_INPUTS / 8 * chunks_of(inner) + 4; }
    static __device__ __forceinline__ int row() { return threadIdx.x % 32 / 4; }
    static __device__ __forceinline__ int vector() { return threadIdx.x % 4; }

    // ``sums`` of COUNT tiles of rows over all inputs.
    template <int COUNT, class Weights, class OutputOf>
    __device__ __forceinline__ void multiply(Weights& weights, OutputOf output_of, int inner,
                                             const uint4* const (&rows)[TILES], float (&sums)[TILES][4]) const {
        int g = threadIdx.x % 32 / 4, lines = weights.lines();
        Outputs outputs = {output_of(g), output_of(g + 8)};
        Scales<Streamed<Format>> scales(format, inner);
        scales.load(outputs, 0, 1);
        Sums<T> parts[SPLIT][COUNT];
        int first = 0;
#pragma unroll 1
        for (; CHUNK_INPUTS * PARTS * (first + AT_ONCE) <= inner; first += AT_ONCE) {
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i)
                multiply_line<true>(weights, scales, outputs, first + i, inner, rows, &parts[i * PARTS]);
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            if (first + i >= lines) break;
            multiply_line<false>(weights, scales, outputs, first + i, inner, rows, &parts[i * PARTS]);
        }
#pragma unroll
        for (int tile = 0; tile < COUNT; ++tile)
#pragma unroll
            for (int part = 0; part < SPLIT; ++part)
#pragma unroll
                for (int j = 0; j < 4; ++j) sums[tile][j] += parts[part][tile].at[j];
    }

    // ``WHOLE``: all groups of the line exist.
    template <bool WHOLE, int COUNT, class Weights>
    __device__ __forceinline__ void multiply_line(Weights& weights, Scales<Streamed<Format>>& scales, Outputs outputs,
                                                  int line, int inner, const uint4* const (&rows)[TILES],
                                                  Sums<T> (*parts)[COUNT]) const {
        int g = threadIdx.x % 32 / 4, thread = threadIdx.x % 4;
        Scales<Streamed<Format>> now = scales;
        if (line + 1 < weights.lines()) scales.load(outputs, (line + 1) * PARTS, 1);
        const uint4* found = weights.oldest();
        uint4 upper[2], lower[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            upper[i] = found[weights.place(g, 4 * i + thread)];
            lower[i] = found[weights.place(g + 8, 4 * i + thread)];
        }
        weights.order();
#pragma unroll
        for (int i = 0; i < PARTS; ++i) {
            int of = line * PARTS + i;
            if (!WHOLE && of >= scales.chunks) break;
            auto high = format.select(now.upper[i], of), low = format.select(now.lower[i], of);
#pragma unroll
            for (int group = 0; group < 4; ++group) {
                if (!WHOLE && CHUNK_INPUTS * of + 32 * group >= inner) break;
                Pair numbers =
                    numbers_of(format, upper[i + group / GROUPS], lower[i + group / GROUPS], high, low, of, group);
#pragma unroll
                for (int tile = 0; tile < COUNT; ++tile)
                    add_group<Format>(parts[i][tile], numbers, rows[tile][16 * of + 4 * group], high, low, group);
            }
        }
    }
};

template <class Format>
__device__ void gate_up_kept(const u16* x, const u8* weight, Streamed<Format> format, Items items, const int* order,
                             int hidden, int width, int per_token, Activation<typename Format::T> activation,
                             u16* activated) {
    auto value_of = [=](int own, float gate, float up) {
        float of_gate = format.factor(own), of_up = format.factor(own + activation.step(width));
        return activation(gate * of_gate, up * of_up, activation.biases(own, width));
    };
    multiply_gate_up(LowBitParts<Format>{format, hidden}, x, weight, items, order, hidden, width, per_token, activation,
                     activated, value_of);
}

// parts[pair] = weight of the pair * (down(activated) + bias), if there is a bias.
template <class Format>
__device__ void down_kept(const u16* activated, const u8* weight, Streamed<Format> format, Items items,
                          const int* order, const float* shares, int hidden, int width, const u16* bias, float* parts) {
    using T = typename Format::T;
    auto store = [=](int expert, int place, int at, float first, float other) {
        int pair = order[place], own = expert * hidden + at;
        float* to = parts + static_cast<i64>(pair) * hidden + at;
        to[0] = (first * format.factor(own) + load1_if<T>(bias, own)) * shares[pair];
        to[8] = (other * format.factor(own + 8) + load1_if<T>(bias, own + 8)) * shares[pair];
    };
    multiply_down(LowBitParts<Format>{format, width}, activated, weight, items, hidden, width, store);
}

#define KEPT_KERNELS(NAME, ...)                                                                                      \
    extern "C" __global__ void __launch_bounds__(KEPT_THREADS, 1) gate_up_kept_##NAME(                               \
        const u16* x, const u8* weight, const __VA_ARGS__::Scale* scales, const __VA_ARGS__::More* more, int shift,  \
        const int* order, const int4* items, const int* item_count, int hidden, int width, int per_token,            \
        const u16* bias, int interleaved, float alpha, float cubic, float limit, float offset, u16* activated,       \
        int room, int stages) {                                                                                      \
        Streamed<__VA_ARGS__> format{{scales, more, shift}};                                                         \
        Activation<__VA_ARGS__::T> activation{bias, interleaved, alpha, cubic, limit, offset};                       \
        gate_up_kept<__VA_ARGS__>(x, weight, format, {items, item_count, room, stages}, order, hidden, width,        \
                                  per_token, activation, activated);                                                 \
    }                                                                                                                \
    extern "C" __global__ void __launch_bounds__(KEPT_THREADS, 1) down_kept_##NAME(                                  \
        const u16* activated, const u8* weight, const __VA_ARGS__::Scale* scales, const __VA_ARGS__::More* more,     \
        int shift, const int* order, const int4* items, const int* item_count, const float* weights, int hidden,     \
        int width, const u16* bias, float* parts, int room, int stages) {                                            \
        Streamed<__VA_ARGS__> format{{scales, more, shift}};                                                         \
        down_kept<__VA_ARGS__>(activated, weight, format, {items, item_count, room, stages}, order, weights, hidden, \
                               width, bias, parts);                                                                  \
    }
