// experts: a mixture of experts, in four launches: who goes where; gate and up with their activation; down; the sum.
//
// Pairs (row, choice) stand in the order of their experts. An item is up to 32 pairs of one expert; a block takes an
// item and some outputs, and reads their weights once for all of its pairs. Inputs are shared by warps in a way that
// depends on the sizes alone, so a pair has the same bits in any company. The number of items is known on the device
// only: as many blocks as run at a time take one unit after the other, those of an expert side by side.

#include "experts_elements.cuh"
#include "experts_route.cuh"
#include "experts_stream.cuh"
#include "variants.cuh"

constexpr int ROUTE_THREADS = 1024;
constexpr int FEW_PAIRS = 1024;  // that are chosen and placed in one launch
constexpr int GATE_SPLIT = 8, DOWN_SPLIT = 4;  // warps that share the inputs of 16 outputs
constexpr int GATES = 8, DOWNS = 16 * WARPS / DOWN_SPLIT;  // outputs of a unit
constexpr int TILES = ITEM_ROWS / 8;
template <class T>
constexpr int AT_ONCE = sizeof(typename T::Element) == 2 ? 2 : 1;  // blocks of a multiprocessor

template <class T>
__device__ void route_few(
    const typename T::Element* logits, int rows, int experts, int per_token, int normalized, float* weights,
    int* order, int* places, int* ends, int4* items, int* item_count
) {
    __shared__ int ids[FEW_PAIRS];
    __shared__ float unread[FEW_PAIRS];
    let_next_begin();
    for (int row = threadIdx.x / 32; row < rows; row += blockDim.x / 32) {
        float* to = (blockIdx.x == 0 ? weights : unread) + row * per_token;
        choose<T>(logits + static_cast<i64>(row) * experts, experts, per_token, normalized, ids + row * per_token, to);
    }
    __syncthreads();
    place(ids, rows * per_token, experts, order, places, ends, items, item_count);
}

template <class T>
__device__ void choose_rows(
    const typename T::Element* logits, int rows, int experts, int per_token, int normalized, int* ids, float* weights
) {
    i64 row = (static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x) / 32;
    if (row >= rows) return;
    choose<T>(
        logits + row * experts, experts, per_token, normalized, ids + row * per_token, weights + row * per_token
    );
}

// What the warps have of a unit, by warp, row and output; two, so that one is read while the other is written.
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

// A unit: 8 gates and the 8 ups beside them. activated[place of the pair] = silu(gate) * up.
template <class T>
__device__ void gate_up(
    const typename T::Element* x, const typename T::Element* weight, const int* order, const int4* items,
    const int* item_count, int hidden, int width, int per_token, typename T::Element* activated
) {
    constexpr int EACH = 16 / sizeof(typename T::Element);
    extern __shared__ uint4 ring[];
    __shared__ Shared shared;
    wait_for_previous();  // for the items
    let_next_begin();
    const uint4* stored = reinterpret_cast<const uint4*>(weight);
    int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, length = hidden / EACH, across = width / GATES;
    int units = *item_count * across, turn = 0;
    auto find = [=](int unit) {
        i64 row = static_cast<i64>(items[unit / across].x) * 2 * width + unit % across * GATES + g;
        return Pair{stored + row * length, stored + (row + width) * length};
    };
    Weights<GATE_SPLIT, decltype(find)> weights(find, stored, length, warp, units, ring);
    for (int unit = blockIdx.x; unit < units; unit += gridDim.x, turn ^= 1) {
        int4 item = items[unit / across];
        int first = unit % across * GATES, count = item.z, tiles = (count + 7) / 8;
        const uint4* rows[TILES];
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) {
            bool there = 8 * tile + g < count;
            i64 row = there ? order[item.y + 8 * tile + g] / per_token : 0;
            rows[tile] = there ? reinterpret_cast<const uint4*>(x) + row * length : nullptr;
        }
        Sums<T> sums[TILES];
        multiply(weights, rows, tiles, sums);
        keep<T>(shared[turn][warp], sums, tiles);
        __syncthreads();
        for (int at = threadIdx.x; at < GATES * count; at += THREADS) {
            int row = at / GATES, i = at % GATES;
            float gate = 0, up = 0;
#pragma unroll
            for (int w = 0; w < GATE_SPLIT; ++w) {
                gate += shared[turn][w][row][i];
                up += shared[turn][w][row][i + 8];
            }
            float value = gate / (1.0f + __expf(-gate)) * up;
            store1<T>(activated + static_cast<i64>(item.y + row) * width + first + i, value);
        }
    }
}

// A unit: 32 outputs. parts[pair] = weight of the pair * down(activated).
template <class T>
__device__ void down(
    const typename T::Element* activated, const typename T::Element* weight, const int* order, const int4* items,
    const int* item_count, const float* shares, int hidden, int width, float* parts
) {
    constexpr int EACH = 16 / sizeof(typename T::Element);
    extern __shared__ uint4 ring[];
    __shared__ Shared shared;
    const uint4* stored = reinterpret_cast<const uint4*>(weight);
    int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, length = width / EACH;
    int across = (hidden + DOWNS - 1) / DOWNS, units = *item_count * across, turn = 0;
    auto find = [=](int unit) {
        int own = unit % across * DOWNS + warp / DOWN_SPLIT * 16;
        const uint4* from = stored + (static_cast<i64>(items[unit / across].x) * hidden + own + g) * length;
        return own < hidden ? Pair{from, from + 8 * length} : Pair{nullptr, nullptr};
    };
    Weights<DOWN_SPLIT, decltype(find)> weights(find, stored, length, warp % DOWN_SPLIT, units, ring);
    let_next_begin();
    wait_for_previous();  // which began behind the items
    for (int unit = blockIdx.x; unit < units; unit += gridDim.x, turn ^= 1) {
        int4 item = items[unit / across];
        int first = unit % across * DOWNS, count = item.z, tiles = (count + 7) / 8;
        const uint4* rows[TILES];
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) {
            i64 row = item.y + 8 * tile + g;
            rows[tile] = 8 * tile + g < count ? reinterpret_cast<const uint4*>(activated) + row * length : nullptr;
        }
        Sums<T> sums[TILES];
        multiply(weights, rows, tiles, sums);
        keep<T>(shared[turn][warp], sums, tiles);
        __syncthreads();
        for (int at = threadIdx.x; at < DOWNS * count; at += THREADS) {
            int row = at / DOWNS, output = at % DOWNS, of = output / 16 * DOWN_SPLIT;
            if (first + output >= hidden) continue;
            float sum = 0;
#pragma unroll
            for (int w = 0; w < DOWN_SPLIT; ++w) sum += shared[turn][of + w][row][output % 16];
            int pair = order[item.y + row];
            parts[static_cast<i64>(pair) * hidden + first + output] = sum * shares[pair];
        }
    }
}

template <class T>
__device__ void sum(const float* parts, int per_token, int hidden, typename T::Element* mixed) {
    wait_for_previous();
    i64 row = blockIdx.x;  // along the axis that takes any number
    int at = 4 * (blockIdx.y * blockDim.x + threadIdx.x);
    if (at >= hidden) return;
    const float* from = parts + row * per_token * hidden + at;
    float4 total = make_float4(0, 0, 0, 0);
    for (int slot = 0; slot < per_token; ++slot) {
        float4 x = *reinterpret_cast<const float4*>(from + static_cast<i64>(slot) * hidden);
        total.x += x.x;
        total.y += x.y;
        total.z += x.z;
        total.w += x.w;
    }
    auto* to = mixed + row * hidden + at;
    T::store2(to, make_float2(total.x, total.y));
    T::store2(to + 2, make_float2(total.z, total.w));
}

// The rows of the pairs in the order of their experts, 16 bytes at a time, for products that take them so.
__device__ __forceinline__ void gather(const uint4* x, const int* order, int length, int per_token, uint4* gathered) {
    const uint4* from = x + static_cast<i64>(order[blockIdx.x] / per_token) * length;
    for (int i = threadIdx.x; i < length; i += blockDim.x) gathered[static_cast<i64>(blockIdx.x) * length + i] = from[i];
}

// The sum of a row's pairs, which stand in the order of their experts and without their weights.
template <class T>
__device__ void sum_places(
    const typename T::Element* given, const int* places, const float* shares, int per_token, int hidden,
    typename T::Element* mixed
) {
    i64 row = blockIdx.x;
    int at = 2 * (blockIdx.y * blockDim.x + threadIdx.x);
    if (at >= hidden) return;
    float2 total = make_float2(0, 0);
    for (int slot = 0; slot < per_token; ++slot) {
        i64 pair = row * per_token + slot;
        float2 x = T::load2(given + static_cast<i64>(places[pair]) * hidden + at);
        total.x += shares[pair] * x.x;
        total.y += shares[pair] * x.y;
    }
    T::store2(mixed + row * hidden + at, total);
}

#define KERNELS(NAME, T)                                                                                              \
    using Element_##NAME = T::Element;                                                                                \
    extern "C" __global__ void __launch_bounds__(ROUTE_THREADS) route_few_##NAME(                                     \
        const Element_##NAME* logits, int rows, int experts, int per_token, int normalized, float* weights,           \
        int* order, int* places, int* ends, int4* items, int* item_count) {                                                        \
        route_few<T>(logits, rows, experts, per_token, normalized, weights, order, places, ends, items, item_count);          \
    }                                                                                                                 \
    extern "C" __global__ void __launch_bounds__(THREADS) choose_##NAME(                                              \
        const Element_##NAME* logits, int rows, int experts, int per_token, int normalized, int* ids,                 \
        float* weights) {                                                                                             \
        choose_rows<T>(logits, rows, experts, per_token, normalized, ids, weights);                                   \
    }                                                                                                                 \
    extern "C" __global__ void __launch_bounds__(ROUTE_THREADS) place_##NAME(                                         \
        const int* ids, int pairs, int experts, int* order, int* places, int* ends, int4* items, int* item_count) {                \
        let_next_begin();                                                                                             \
        place(ids, pairs, experts, order, places, ends, items, item_count);                                                   \
    }                                                                                                                 \
    extern "C" __global__ void __launch_bounds__(THREADS, AT_ONCE<T>) gate_up_##NAME(                                          \
        const Element_##NAME* x, const Element_##NAME* weight, const int* order, const int4* items,                   \
        const int* item_count, int hidden, int width, int per_token, Element_##NAME* activated) {                     \
        gate_up<T>(x, weight, order, items, item_count, hidden, width, per_token, activated);                         \
    }                                                                                                                 \
    extern "C" __global__ void __launch_bounds__(THREADS, AT_ONCE<T>) down_##NAME(                                             \
        const Element_##NAME* activated, const Element_##NAME* weight, const int* order, const int4* items,           \
        const int* item_count, const float* weights, int hidden, int width, float* parts) {                           \
        down<T>(activated, weight, order, items, item_count, weights, hidden, width, parts);                          \
    }                                                                                                                 \
    extern "C" __global__ void __launch_bounds__(THREADS) sum_##NAME(                                                 \
        const float* parts, int per_token, int hidden, Element_##NAME* mixed) {                                       \
        sum<T>(parts, per_token, hidden, mixed);                                                                      \
    }                                                                                                                 \
    extern "C" __global__ void __launch_bounds__(THREADS) gather_##NAME(                                              \
        const Element_##NAME* x, const int* order, int length, int per_token, Element_##NAME* gathered) {             \
        gather(reinterpret_cast<const uint4*>(x), order, length, per_token, reinterpret_cast<uint4*>(gathered));      \
    }                                                                                                                 \
    extern "C" __global__ void __launch_bounds__(THREADS) sum_places_##NAME(                                          \
        const Element_##NAME* given, const int* places, const float* shares, int per_token, int hidden,               \
        Element_##NAME* mixed) {                                                                                      \
        sum_places<T>(given, places, shares, per_token, hidden, mixed);                                               \
    }

IF_BF16(KERNELS(bf16, Bf16))
IF_FP16(KERNELS(fp16, Fp16))
IF_FP32(KERNELS(fp32, Fp32))
