// What stands between products in float8, a block per row: rounding to float8 with a scale per row, behind a gated
// activation (some blocks per row) or a residual norm where one stands in front of it. Results of products come without
// their scales, which are applied as they are read. Widths are multiples of 8.

#include "float8_product.cuh"
#include "variants.cuh"

constexpr int THREADS = 512;

template <class T>
__device__ void quantize_tokens(
    const typename T::Element* x, const float* given, int width, u8* quantized, float* scales
) {
    i64 row = blockIdx.x;
    quantize_row(width, given, quantized + row * width, scales + row, [&](int i) {
        return load8<T>(x + row * width + i);
    });
}

// ROWS rows at a time, by the blocks of a cluster: each has its columns of all of them, whose scales are read once.
template <class T, int ROWS>
__device__ void quantized_swiglu(
    const typename T::Element* gate_up, const float* scales, const float* weight_scales, const float* given, int rows,
    int width, u8* quantized, float* made
) {
    int row = ROWS * blockIdx.y, stride = 8 * blockDim.x * blocks_of_row();
    int first = 8 * (block_rank() * blockDim.x + threadIdx.x);
    float largest[ROWS] = {};
    Eight held[ROWS];
    blocks_begin();
    auto activated = [&](int r, int i) {
        const auto* gates = gate_up + (row + r) * static_cast<i64>(2 * width) + i;
        Eight gate = scaled8<T>(gates, scales[row + r], weight_scales + i);
        Eight up = scaled8<T>(gates + width, scales[row + r], weight_scales + width + i);
        round_to<T>(gate);
        round_to<T>(up);
#pragma unroll
        for (int j = 0; j < 8; ++j) gate.at[j] = gate.at[j] / (1.0f + __expf(-gate.at[j])) * up.at[j];
        round_to<T>(gate);
        return gate;
    };
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        if (row + r >= rows) continue;
        if (first < width) enlarge(largest[r], held[r] = activated(r, first));
        for (int i = first + stride; i < width; i += stride) enlarge(largest[r], activated(r, i));
    }
    blocks_max(largest);
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        if (row + r >= rows) continue;
        float by = scale_of(largest[r], given);
        u8* to = quantized + (row + r) * static_cast<i64>(width);
        if (first < width) store_float8(to + first, held[r], by);
        for (int i = first + stride; i < width; i += stride) store_float8(to + i, activated(r, i), by);
        if (first == 0) made[row + r] = by;
    }
}

template <class T>
__device__ void quantized_norm(
    const typename T::Element* skip, const typename T::Element* product, const float* scales,
    const float* weight_scales, const typename T::Element* weight, const float* given, int width, float epsilon,
    u8* quantized, float* made, typename T::Element* sum
) {
    i64 row = blockIdx.x, at = row * width;
    int stride = 8 * blockDim.x, first = 8 * threadIdx.x;
    float scale = scales[row], squares = 0, largest = 0;
    // The sum, stored, times the norm's weight: how large the largest becomes follows from it and from the norm.
    auto weighted = [&](int i) {
        Eight w = load8<T>(weight + i), x = scaled8<T>(product + at + i, scale, weight_scales + i);
        Eight before = load8<T>(skip + at + i);
        round_to<T>(x);
#pragma unroll
        for (int j = 0; j < 8; ++j) x.at[j] += before.at[j];
        round_to<T>(x);
        store8<T>(sum + at + i, x);
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            squares += x.at[j] * x.at[j];
            x.at[j] *= w.at[j];
        }
        enlarge(largest, x);
        return x;
    };
    Eight held;
    if (first < width) held = weighted(first);
    for (int i = first + stride; i < width; i += stride) weighted(i);
    row_sum_and_max(squares, largest);
    float by = rsqrtf(squares / width + epsilon), to = scale_of(rounded<T>(largest * by), given);
    auto store = [&](int i, Eight x) {
#pragma unroll
        for (int j = 0; j < 8; ++j) x.at[j] *= by;
        round_to<T>(x);
        store_float8(quantized + at + i, x, to);
    };
    if (first < width) store(first, held);
    for (int i = first + stride; i < width; i += stride) {
        Eight x = load8<T>(sum + at + i), w = load8<T>(weight + i);
#pragma unroll
        for (int j = 0; j < 8; ++j) x.at[j] *= w.at[j];
        store(i, x);
    }
    if (threadIdx.x == 0) made[row] = to;
}

// What a product gives, times its scales, in place: for readers that know no scales.
template <class T>
__device__ void scale_product(const float* scales, const float* weight_scales, int width, typename T::Element* x) {
    i64 row = blockIdx.y;
    int i = 8 * (blockIdx.x * blockDim.x + threadIdx.x);
    if (i < width) store8<T>(x + row * width + i, scaled8<T>(x + row * width + i, scales[row], weight_scales + i));
}

#define SWIGLU(NAME, T, ROWS)                                                                                         \
    extern "C" __global__ void __launch_bounds__(THREADS) NAME(                                                       \
        const T::Element* gate_up, const float* scales, const float* weight_scales, const float* given, int rows,     \
        int width, u8* quantized, float* made) {                                                                      \
        quantized_swiglu<T, ROWS>(gate_up, scales, weight_scales, given, rows, width, quantized, made);               \
    }

#define KERNELS(NAME, T)                                                                                              \
    using Element_##NAME = T::Element;                                                                                \
    extern "C" __global__ void __launch_bounds__(THREADS) quantize_tokens_##NAME(                                     \
        const Element_##NAME* x, const float* given, int width, u8* quantized, float* scales) {                       \
        quantize_tokens<T>(x, given, width, quantized, scales);                                                       \
    }                                                                                                                 \
    SWIGLU(quantized_swiglu_##NAME, T, 1)                                                                             \
    SWIGLU(quantized_swiglu_4_##NAME, T, 4)                                                                           \
    extern "C" __global__ void __launch_bounds__(32 * PRODUCT_WARPS) few_rows_##NAME(                                 \
        const u8* quantized, const float* scales, const u8* weight, const float* weight_scales, int rows, int width,  \
        int inner, Element_##NAME* product) {                                                                         \
        few_rows<T>(quantized, scales, weight, weight_scales, rows, width, inner, product);                           \
    }                                                                                                                 \
    extern "C" __global__ void __launch_bounds__(THREADS) quantized_norm_##NAME(                                      \
        const Element_##NAME* skip, const Element_##NAME* product, const float* scales, const float* weight_scales,   \
        const Element_##NAME* weight, const float* given, int width, float epsilon, u8* quantized, float* made,       \
        Element_##NAME* sum) {                                                                                        \
        quantized_norm<T>(                                                                                            \
            skip, product, scales, weight_scales, weight, given, width, epsilon, quantized, made, sum);               \
    }                                                                                                                 \
    extern "C" __global__ void __launch_bounds__(256) scale_product_##NAME(                                           \
        const float* scales, const float* weight_scales, int width, Element_##NAME* product) {                        \
        scale_product<T>(scales, weight_scales, width, product);                                                      \
    }

IF_BF16(KERNELS(bf16, Bf16))
IF_FP16(KERNELS(fp16, Fp16))
IF_FP32(KERNELS(fp32, Fp32))
