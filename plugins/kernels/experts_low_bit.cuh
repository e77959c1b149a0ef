// Experts with weights of 4 or 8 bits in the order of low_bit.cuh, and KERNELS(NAME, FORMAT): the kernels of a format.
#pragma once
#include "experts_matmuls.cuh"
#include "low_bit.cuh"
#include "low_bit_weights.cuh"
#include "variants.cuh"

template <class Format_>
struct Streamed : Format_ {
    static constexpr int PARTS = 2 / Format_::LOADS;  // chunks of 128 inputs in one of the stream
    static constexpr int GATE_SPLIT = 4;
    static __device__ __forceinline__ int vectors(int inner) { return 4 * Format_::LOADS * chunks_of(inner); }
};

// Scales are loaded one chunk of the stream ahead, in registers, and come from the second-level cache.
template <class Format>
struct Scales<Streamed<Format>> {
    static constexpr int PARTS = Streamed<Format>::PARTS;
    Format format;
    int chunks, stored;
    typename Format::Held upper[PARTS], lower[PARTS];

    __device__ __forceinline__ Scales(Streamed<Format> format, int inner)
        : format(format), chunks(chunks_of(inner)), stored(format.stored(inner)) {}

    // Of the chunks `first` and first + stride.
    __device__ __forceinline__ void load(Outputs outputs, int first, int stride) {
        if (outputs.upper < 0) return;
#pragma unroll
        for (int i = 0; i < PARTS; ++i) {
            int chunk = first + i * stride;
            if (chunk >= chunks) break;
            upper[i] = format.load(static_cast<i64>(outputs.upper) * stored, chunk);
            lower[i] = format.load(static_cast<i64>(outputs.lower) * stored, chunk);
        }
    }
    // Into that cache: 128 bytes of either output by each of `warps` warps at a time.
    __device__ __forceinline__ void prefetch(Outputs outputs, int warp, int warps) const {
        if (outputs.upper < 0) return;
        constexpr int EACH = 32 / sizeof(typename Format::Scale);
        for (int at = EACH * (4 * warp + threadIdx.x % 4); at < stored; at += 4 * EACH * warps) {
            prefetched(format.scales + static_cast<i64>(outputs.upper) * stored + at);
            prefetched(format.scales + static_cast<i64>(outputs.lower) * stored + at);
        }
    }
    static __device__ __forceinline__ void prefetched(const void* at) {
        asm volatile("prefetch.global.L2 [%0];" ::"l"(at));
    }
};

// Rows are loaded with the chunk that they are multiplied with: there are no registers for more.
template <class Format>
struct Ahead<Streamed<Format>> {
    template <class Weights>
    __device__ __forceinline__ void load(const Weights&, const uint4*, int) {}
};

// As for unquantized weights. A number or the sum of a group is multiplied by its scale, so no weight is rounded.
template <class Format, int TILES, class Weights>
__device__ __forceinline__ void multiply(Weights& weights, Scales<Streamed<Format>>& scales, Outputs outputs,
                                         Outputs following, const uint4* const (&rows)[TILES], const uint4*,
                                         Ahead<Streamed<Format>>&, int tiles, Sums<typename Format::T> (&sums)[TILES]) {
    using T = typename Format::T;
    constexpr int LOADS = Format::LOADS, GROUPS = 4 / LOADS, PARTS = 2 / LOADS;
    constexpr bool EARLY = Format::SCALES_NUMBERS;  // rows of all tiles; else their scales need the registers
    const Format& format = scales.format;
    int inner = weights.inner, thread = threadIdx.x % 4;
    for (int chunk = 0; chunk < weights.chunks(); ++chunk) {
        Scales<Streamed<Format>> now = scales;
        bool more = chunk + 1 < weights.chunks();
        scales.load(more ? outputs : following, weights.piece(more ? chunk + 1 : 0, 0), Weights::SPLIT);
        const uint4* found = nullptr;
        uint4 upper[2], lower[2];
#pragma unroll
        for (int i = 0; i < PARTS; ++i) {
            int of = weights.piece(chunk, i);
            auto load = [&](int tile, int group) {
                return Sums<T>::load(rows[tile], 16 * of + 4 * group + thread, inner / 8);
            };
            uint4 first[4];  // of the first tile, often the only one
#pragma unroll
            for (int group = 0; group < 4; ++group) first[group] = load(0, group);
            if (i == 0) {
                found = weights.oldest();
                upper[0] = found[0], upper[1] = found[THREADS];
                lower[0] = found[2 * THREADS], lower[1] = found[3 * THREADS];
            }
            if (of >= scales.chunks) break;
            typename Format::Held high = format.select(now.upper[i], of), low = format.select(now.lower[i], of);
#pragma unroll
            for (int group = 0; group < 4; ++group) {
                if (CHUNK_INPUTS * of + 32 * group >= inner) break;
                uint4 x[TILES] = {first[group]};
                if (EARLY && tiles > 1) {
#pragma unroll
                    for (int tile = 1; tile < TILES; ++tile) x[tile] = load(tile, group);
                }
                u32 of_high = format.operand(high, of, group), of_low = format.operand(low, of, group);
                u32 numbers[2][4];
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    numbers[0][j] = Format::pair(upper[i + group / GROUPS], group % GROUPS, j, of_high);
                    numbers[1][j] = Format::pair(lower[i + group / GROUPS], group % GROUPS, j, of_low);
                }
                uint4 one = make_uint4(numbers[0][0], numbers[0][1], numbers[0][2], numbers[0][3]);
                uint4 other = make_uint4(numbers[1][0], numbers[1][1], numbers[1][2], numbers[1][3]);
#pragma unroll
                for (int tile = 0; tile < TILES; ++tile) {
                    if (tile >= tiles) break;
                    if (!EARLY && tile > 0) x[tile] = load(tile, group);
                    if constexpr (Format::SCALES_NUMBERS) {
                        sums[tile].add(one, other, x[tile]);
                    } else {
                        Sums<T> sum;
                        sum.add(one, other, x[tile]);
#pragma unroll
                        for (int j = 0; j < 4; ++j)
                            sums[tile].at[j] += Format::scale(j < 2 ? high : low, group) * sum.at[j];
                    }
                }
            }
        }
        weights.order();
    }
}

#define KERNELS(NAME, ...)                                                                                             \
    extern "C" __global__ void __launch_bounds__(THREADS, 2) gate_up_##NAME(                                           \
        const u16* x, const u8* weight, const __VA_ARGS__::Scale* scales, const __VA_ARGS__::More* more, int shift,    \
        const int* order, const int4* items, const int* item_count, int hidden, int width, int per_token,              \
        const u16* bias, int interleaved, float alpha, float cubic, float limit, float offset, u16* activated) {       \
        Streamed<__VA_ARGS__> format{{scales, more, shift}};                                                           \
        Activation<__VA_ARGS__::T> activation{bias, interleaved, alpha, cubic, limit, offset};                         \
        gate_up(x, weight, format, order, items, item_count, hidden, width, per_token, activation, activated);         \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(THREADS, 2) down_##NAME(                                              \
        const u16* activated, const u8* weight, const __VA_ARGS__::Scale* scales, const __VA_ARGS__::More* more,       \
        int shift, const int* order, const int4* items, const int* item_count, const float* weights, int hidden,       \
        int width, const u16* bias, float* parts) {                                                                    \
        Streamed<__VA_ARGS__> format{{scales, more, shift}};                                                           \
        down(activated, weight, format, order, items, item_count, weights, hidden, width, bias, parts);                \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                              \
        weights_##NAME(const u8* weight, const __VA_ARGS__::Scale* scales, const __VA_ARGS__::More* more, int outputs, \
                       int inner, int shift, u16* numbers) {                                                           \
        low_bit_weights<__VA_ARGS__>(weight, __VA_ARGS__{scales, more, shift}, outputs, inner, numbers);               \
    }
