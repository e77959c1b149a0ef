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
    static constexpr bool WHOLE_TILES = Format_::SCALES_NUMBERS;  // others need the registers for scales of groups
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

// A thread's numbers of a group of 32 inputs, of two outputs.
struct Pair { uint4 upper, lower; };

// From the outputs' words; `high` and `low`: what is selected of their scales in the chunk.
template <class Format, class Selected>
__device__ __forceinline__ Pair numbers_of(const Format& format, const uint4& upper, const uint4& lower, Selected high,
                                           Selected low, int chunk, int group) {
    constexpr int GROUPS = 4 / Format::LOADS;
    u32 of_high = format.operand(high, chunk, group), of_low = format.operand(low, chunk, group), numbers[2][4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        numbers[0][j] = Format::pair(upper, group % GROUPS, j, of_high);
        numbers[1][j] = Format::pair(lower, group % GROUPS, j, of_low);
    }
    return {make_uint4(numbers[0][0], numbers[0][1], numbers[0][2], numbers[0][3]),
            make_uint4(numbers[1][0], numbers[1][1], numbers[1][2], numbers[1][3])};
}

// A number or the sum of a group is multiplied by its scale, so no weight is rounded.
template <class Format, class Selected>
__device__ __forceinline__ void add_group(Sums<typename Format::T>& sums, const Pair& numbers, uint4 x, Selected high,
                                          Selected low, int group) {
    if constexpr (Format::SCALES_NUMBERS) {
        sums.add(numbers.upper, numbers.lower, x);
    } else {
        Sums<typename Format::T> sum;
        sum.add(numbers.upper, numbers.lower, x);
#pragma unroll
        for (int j = 0; j < 4; ++j) sums.at[j] += Format::scale(j < 2 ? high : low, group) * sum.at[j];
    }
}

// Of as many tiles as there are.
template <class Format, int TILES, class Weights>
__device__ __forceinline__ void multiply_any(Weights& weights, Scales<Streamed<Format>>& scales, Outputs outputs,
                                             Outputs following, const uint4* const (&rows)[TILES], int tiles,
                                             Sums<typename Format::T> (&sums)[TILES]) {
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
            auto high = format.select(now.upper[i], of), low = format.select(now.lower[i], of);
#pragma unroll
            for (int group = 0; group < 4; ++group) {
                if (CHUNK_INPUTS * of + 32 * group >= inner) break;
                uint4 x[TILES] = {first[group]};
                if (EARLY && tiles > 1) {
#pragma unroll
                    for (int tile = 1; tile < TILES; ++tile) x[tile] = load(tile, group);
                }
                Pair numbers =
                    numbers_of(format, upper[i + group / GROUPS], lower[i + group / GROUPS], high, low, of, group);
#pragma unroll
                for (int tile = 0; tile < TILES; ++tile) {
                    if (tile >= tiles) break;
                    if (!EARLY && tile > 0) x[tile] = load(tile, group);
                    add_group<Format>(sums[tile], numbers, x[tile], high, low, group);
                }
            }
        }
        weights.order();
    }
}

// The same of 8 * TILES rows, all of which exist, in fewer instructions and with the same bits: nothing is checked in
// chunks whose groups all exist. A thread loads its 16 bytes of a row AHEAD groups of 32 inputs before it needs them.
template <int TILES, class Format, class Weights>
struct Tiles {
    using T = typename Format::T;
    static constexpr int LOADS = Format::LOADS, GROUPS = 4 / LOADS, PARTS = 2 / LOADS, STEPS = 4 * PARTS;
    static constexpr int BUFFERS = TILES == 1 ? 4 : TILES == 2 ? 2 : 1, AHEAD = BUFFERS - 1, SPLIT = Weights::SPLIT;
    const uint4* from[TILES];  // of the chunk
    uint4 x[BUFFERS][TILES];
    int left;  // groups from the first one of the chunk on

    // The number of a step's group among those from the first of a chunk on; steps of the next chunk follow.
    static __device__ __forceinline__ constexpr int group_of(int step) { return 4 * SPLIT * (step / 4) + step % 4; }

    template <int ALL>
    __device__ __forceinline__ Tiles(const Weights& weights, const uint4* const (&rows)[ALL])
        : left(weights.inner / 32 - 4 * weights.part) {
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) from[tile] = rows[tile] + 16 * weights.part + threadIdx.x % 4;
#pragma unroll
        for (int step = 0; step < AHEAD; ++step) load(step, left > group_of(step));
    }
    __device__ __forceinline__ void load(int step, bool there) {
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) {
            if (there) x[step % BUFFERS][tile] = __ldg(from[tile] + 4 * group_of(step));
        }
    }
    __device__ __forceinline__ bool whole() const { return left > group_of(STEPS - 1); }

    // ``WHOLE``: all groups of the chunk exist.
    template <bool WHOLE, int ALL>
    __device__ __forceinline__ void multiply(Weights& weights, Scales<Streamed<Format>>& scales, Outputs outputs,
                                             int chunk, Sums<T> (&sums)[ALL]) {
        const Format& format = scales.format;
        Scales<Streamed<Format>> now = scales;
        if (chunk + 1 < weights.chunks()) scales.load(outputs, weights.piece(chunk + 1, 0), SPLIT);
        const uint4* found = weights.oldest();
        uint4 upper[LOADS], lower[LOADS];
        decltype(format.select(now.upper[0], 0)) high, low;
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
            int i = step / 4, group = step % 4, of = weights.piece(chunk, i);
            load(step + AHEAD, (WHOLE && step + AHEAD < STEPS) || left > group_of(step + AHEAD));
            if (!WHOLE && left <= group_of(step)) continue;
            if (group == 0) {
#pragma unroll
                for (int j = 0; j < LOADS; ++j)
                    upper[j] = found[(i + j) * THREADS], lower[j] = found[(2 + i + j) * THREADS];
                high = format.select(now.upper[i], of), low = format.select(now.lower[i], of);
            }
            Pair numbers = numbers_of(format, upper[group / GROUPS], lower[group / GROUPS], high, low, of, group);
#pragma unroll
            for (int tile = 0; tile < TILES; ++tile) {
                sums[tile].add(numbers.upper, numbers.lower, x[step % BUFFERS][tile]);
            }
        }
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) from[tile] += 16 * SPLIT * PARTS;
        left -= 4 * SPLIT * PARTS;
        weights.order();
    }
};

template <int TILES, class Format, int ALL, class Weights>
__device__ __forceinline__ void multiply_tiles(Weights& weights, Scales<Streamed<Format>>& scales, Outputs outputs,
                                               Outputs following, const uint4* const (&rows)[ALL],
                                               Sums<typename Format::T> (&sums)[ALL]) {
    Tiles<TILES, Format, Weights> tiles(weights, rows);
    int chunk = 0;
    while (tiles.whole()) tiles.template multiply<true>(weights, scales, outputs, chunk++, sums);
    while (chunk < weights.chunks()) tiles.template multiply<false>(weights, scales, outputs, chunk++, sums);
    scales.load(following, weights.part, Weights::SPLIT);
}

// As for unquantized weights. ``shared_rows``: other blocks read the same rows, so that caches have them.
template <class Format, int TILES, class Weights>
__device__ __forceinline__ void multiply(Weights& weights, Scales<Streamed<Format>>& scales, Outputs outputs,
                                         Outputs following, const uint4* const (&rows)[TILES], const uint4*,
                                         Ahead<Streamed<Format>>&, int tiles, bool shared_rows,
                                         Sums<typename Format::T> (&sums)[TILES]) {
    if constexpr (Streamed<Format>::WHOLE_TILES) {
        if (tiles > 2) return multiply_tiles<TILES>(weights, scales, outputs, following, rows, sums);
        if (tiles > 1) return multiply_tiles<2>(weights, scales, outputs, following, rows, sums);
        if (shared_rows) return multiply_tiles<1>(weights, scales, outputs, following, rows, sums);
    }
    multiply_any(weights, scales, outputs, following, rows, tiles, sums);
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
