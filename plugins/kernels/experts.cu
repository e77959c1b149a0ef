// experts: a mixture of experts, in four launches: routing; gate and up with their activation; down; the sum.
//
// Pairs (row, choice) are sorted by expert; a shared expert is one more choice of every row. An item is up to 32 pairs
// of one expert, whose weights are read once for all of them. A pair's result does not depend on the other pairs. Only
// the device knows the number of items: as many blocks as run at a time take one unit after another.

#include "experts_matmuls.cuh"
#include "experts_ordered.cuh"
#include "experts_route.cuh"
#include "variants.cuh"

constexpr int ROUTE_THREADS = 1024;

template <class T>
__device__ void choose_rows(const typename T::Element* logits, int rows, int experts, int per_token, int normalized,
                            int shared_columns, const typename T::Element* factors, int* ids, float* weights) {
    begin_next();
    wait_for_previous();
    i64 row = (static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x) / 32;
    if (row >= rows) return;
    int shared = shared_columns > 0, choices = per_token + shared;
    const auto* of_row = logits + row * (experts + shared_columns);
    choose<T>(of_row, experts, per_token, normalized, shared, factors, ids + row * choices, weights + row * choices);
}

template <class T>
__device__ void sum(const float* parts, int per_token, int hidden, typename T::Element* mixed) {
    begin_next();
    wait_for_previous();
    i64 row = blockIdx.x;  // the axis that takes any number of rows
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

// Each row at the places of its pairs, sorted by expert, for the grouped matmuls. It is read once, 16 bytes at a time.
__device__ __forceinline__ void gather(const uint4* x, const int* __restrict__ places, int length, int per_token,
                                       uint4* __restrict__ gathered) {
    i64 row = blockIdx.x;
    for (int i = threadIdx.x; i < length; i += blockDim.x) {
        uint4 values = x[row * length + i];
#pragma unroll 4
        for (int slot = 0; slot < per_token; ++slot) {
            gathered[static_cast<i64>(places[row * per_token + slot]) * length + i] = values;
        }
    }
}

// The activation of the grouped matmuls' gates and ups, whose rows are sorted by expert.
template <class T>
__device__ void activate(const typename T::Element* both, const int* ends, int experts, int width,
                         Activation<T> activation, typename T::Element* activated) {
    i64 place = blockIdx.x;
    int expert = expert_of(blockIdx.x, ends, experts);
    const auto* rows = both + place * 2 * width;
    for (int i = threadIdx.x; i < width; i += blockDim.x) {
        int gate = activation.gate_row(0, i, width);
        float2 biases = activation.biases(expert * 2 * width + gate, width);
        float value = activation(load1<T>(rows + gate), load1<T>(rows + gate + activation.step(width)), biases);
        store1<T>(activated + place * width + i, value);
    }
}

// The sum of a row's pairs, which are sorted by expert and neither biased nor weighted yet.
template <class T>
__device__ void sum_places(const typename T::Element* given, const int* places, const float* shares, const int* ends,
                           int experts, const typename T::Element* bias, int per_token, int hidden,
                           typename T::Element* mixed) {
    using Element = typename T::Element;
    constexpr int WIDE = 16 / sizeof(Element);  // elements that a thread reads at once
    begin_next();
    wait_for_previous();
    i64 row = blockIdx.x;
    int at = WIDE * (blockIdx.y * blockDim.x + threadIdx.x);
    if (at >= hidden) return;
    float2 totals[WIDE / 2] = {};
#pragma unroll 4
    for (int slot = 0; slot < per_token; ++slot) {
        i64 pair = row * per_token + slot;
        int place = places[pair];
        float share = shares[pair];
        uint4 word = *reinterpret_cast<const uint4*>(given + static_cast<i64>(place) * hidden + at);
        const Element* of_expert = bias ? bias + static_cast<i64>(expert_of(place, ends, experts)) * hidden + at : bias;
#pragma unroll
        for (int p = 0; p < WIDE / 2; ++p) {
            float2 x = T::load2(reinterpret_cast<const Element*>(&word) + 2 * p);
            if (bias) {
                x.x += load1<T>(of_expert + 2 * p);
                x.y += load1<T>(of_expert + 2 * p + 1);
            }
            totals[p].x += share * x.x;
            totals[p].y += share * x.y;
        }
    }
    uint4 word;
#pragma unroll
    for (int p = 0; p < WIDE / 2; ++p) T::store2(reinterpret_cast<Element*>(&word) + 2 * p, totals[p]);
    *reinterpret_cast<uint4*>(mixed + row * hidden + at) = word;
}

#define KERNELS(NAME, T)                                                                                               \
    using Element_##NAME = T::Element;                                                                                 \
    extern "C" __global__ void __launch_bounds__(ROUTE_THREADS)                                                        \
        route_few_##NAME(const Element_##NAME* logits, int rows, int experts, int per_token, int normalized,           \
                         int shared_columns, const Element_##NAME* factors, int most, float* weights, int* order,      \
                         int* places, int* ends, int4* items, int* item_count) {                                       \
        route_few<T>(logits, rows, experts, per_token, normalized, shared_columns, factors, most, weights, order,      \
                     places, ends, items, item_count);                                                                 \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                              \
        choose_##NAME(const Element_##NAME* logits, int rows, int experts, int per_token, int normalized,              \
                      int shared_columns, const Element_##NAME* factors, int* ids, float* weights) {                   \
        choose_rows<T>(logits, rows, experts, per_token, normalized, shared_columns, factors, ids, weights);           \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(ROUTE_THREADS)                                                        \
        place_##NAME(const int* ids, int pairs, int experts, int most, int* order, int* places, int* ends,             \
                     int4* items, int* item_count) {                                                                   \
        begin_next();                                                                                                  \
        wait_for_previous();                                                                                           \
        place(ids, pairs, experts, most, order, places, ends, items, item_count);                                      \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                              \
        sum_##NAME(const float* parts, int per_token, int hidden, Element_##NAME* mixed) {                             \
        sum<T>(parts, per_token, hidden, mixed);                                                                       \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(THREADS) gather_##NAME(                                               \
        const Element_##NAME* x, const int* places, int length, int per_token, Element_##NAME* gathered) {             \
        gather(reinterpret_cast<const uint4*>(x), places, length, per_token, reinterpret_cast<uint4*>(gathered));      \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(THREADS) activate_##NAME(                                             \
        const Element_##NAME* both, const int* ends, int experts, int width, const Element_##NAME* bias,               \
        int interleaved, float alpha, float cubic, float limit, float offset, Element_##NAME* activated) {             \
        activate<T>(both, ends, experts, width, {bias, interleaved, alpha, cubic, limit, offset}, activated);          \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                              \
        sum_places_##NAME(const Element_##NAME* given, const int* places, const float* shares, const int* ends,        \
                          int experts, const Element_##NAME* bias, int per_token, int hidden, Element_##NAME* mixed) { \
        sum_places<T>(given, places, shares, ends, experts, bias, per_token, hidden, mixed);                           \
    }

#define STREAMED(NAME, T)                                                                                         \
    extern "C" __global__ void __launch_bounds__(THREADS, AT_ONCE<T>) gate_up_##NAME(                             \
        const Element_##NAME* x, const Element_##NAME* weight, const int* order, const int4* items,               \
        const int* item_count, int hidden, int width, int per_token, const Element_##NAME* bias, int interleaved, \
        float alpha, float cubic, float limit, float offset, Element_##NAME* activated) {                         \
        Activation<T> activation{bias, interleaved, alpha, cubic, limit, offset};                                 \
        gate_up(x, weight, Unquantized<T>{}, order, items, item_count, hidden, width, per_token, activation,      \
                activated);                                                                                       \
    }                                                                                                             \
    extern "C" __global__ void __launch_bounds__(THREADS, AT_ONCE<T>)                                             \
        down_##NAME(const Element_##NAME* activated, const Element_##NAME* weight, const int* order,              \
                    const int4* items, const int* item_count, const float* weights, int hidden, int width,        \
                    const Element_##NAME* bias, float* parts) {                                                   \
        down(activated, weight, Unquantized<T>{}, order, items, item_count, weights, hidden, width, bias, parts); \
    }

#define ORDERED(NAME, T)                                                                                               \
    extern "C" __global__ void __launch_bounds__(KEPT_THREADS, 1)                                                      \
        gate_up_ordered_##NAME(const u16* x, const u16* weight, const int4* items, const int* item_count, int room,    \
                               int stages, int hidden, int width, const int* order, int per_token, const u16* bias,    \
                               int interleaved, float alpha, float cubic, float limit, float offset, u16* activated) { \
        Activation<T> activation{bias, interleaved, alpha, cubic, limit, offset};                                      \
        gate_up_ordered<T>(x, weight, {items, item_count, room, stages}, hidden, width, order, per_token, activation,  \
                           activated);                                                                                 \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(KEPT_THREADS, 1)                                                      \
        down_ordered_##NAME(const u16* activated, const u16* weight, const int4* items, const int* item_count,         \
                            int room, int stages, int hidden, int width, u16* outputs) {                               \
        down_ordered<T>(activated, weight, {items, item_count, room, stages}, hidden, width, outputs);                 \
    }

IF_BF16(KERNELS(bf16, Bf16) STREAMED(bf16, Bf16) ORDERED(bf16, Bf16))
IF_FP16(KERNELS(fp16, Fp16) STREAMED(fp16, Fp16) ORDERED(fp16, Fp16))
IF_FP32(KERNELS(fp32, Fp32) STREAMED(fp32, Fp32))
