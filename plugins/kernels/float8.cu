// Kernels between float8 matmuls, a block per row: quantization to float8 with a scale per row, after a gated
// activation (several blocks per row), after a residual norm, or alone. Matmul results come without their scales; these
// kernels apply them when they read. Widths are multiples of 8.

#include "float8_matmul.cuh"
#include "float8_ordered.cuh"
#include "variants.cuh"

template <class T>
__device__ void quantize_tokens(const typename T::Element* x, const float* given, int width, u8* quantized,
                                float* scales) {
    i64 row = blockIdx.x;
    begin_next();
    wait_for_previous();
    quantize_row(width, given, quantized + row * width, scales + row,
                 [&](int i) { return load8<T>(x + row * width + i); });
}

// A row by the blocks of a cluster; one block if there are many rows. A thread keeps its first SWEEPS times eight
// activated values, and computes further ones twice.
template <class T, int SWEEPS>
__device__ void quantized_swiglu(const typename T::Element* gate_up, const float* scales, const float* weight_scales,
                                 const float* given, int width, u8* quantized, float* made) {
    int blocks = blocks_of_row(), stride = 8 * blockDim.x * blocks;
    int first = 8 * (block_rank() * blockDim.x + threadIdx.x);
    i64 row = blockIdx.x / blocks;
    const auto *gates = gate_up + row * 2 * width, *ups = gates + width;
    Eight of_gates = {}, of_ups = {};
    if (first < width) {
        of_gates = load8<Fp32>(weight_scales + first);
        of_ups = load8<Fp32>(weight_scales + width + first);
    }
    begin_next();
    if (blocks > 1) blocks_begin();
    wait_for_previous();

    float scale = scales[row], largest = 0;
    Packed<T> held[SWEEPS], up[SWEEPS];
#pragma unroll
    for (int sweep = 0; sweep < SWEEPS; ++sweep) {
        int i = first + sweep * stride;
        if (i < width) held[sweep] = packed8<T>(gates + i);
        if (i < width) up[sweep] = packed8<T>(ups + i);
    }
    auto activated = [&](int i, const Packed<T>& gate, const Packed<T>& up) {
        if (i != first) {
            of_gates = load8<Fp32>(weight_scales + i);
            of_ups = load8<Fp32>(weight_scales + width + i);
        }
        Eight x = scaled8<T>(gate, scale, of_gates), y = scaled8<T>(up, scale, of_ups);
        round_to<T>(x);
        round_to<T>(y);
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            x.at[j] = x.at[j] * reciprocal_approx(1.0f + exp2_approx(-LOG2_E * x.at[j])) * y.at[j];
        }
        Packed<T> packed = pack8<T>(x);
        enlarge(largest, unpack8<T>(packed));
        return packed;
    };
#pragma unroll
    for (int sweep = 0; sweep < SWEEPS; ++sweep) {
        int i = first + sweep * stride;
        if (i < width) held[sweep] = activated(i, held[sweep], up[sweep]);
    }
    for (int i = first + SWEEPS * stride; i < width; i += stride)
        activated(i, packed8<T>(gates + i), packed8<T>(ups + i));
    Divisor by = divisor(blocks > 1 ? blocks_max(largest) : row_max(largest), given);
    u8* to = quantized + row * width;
#pragma unroll
    for (int sweep = 0; sweep < SWEEPS; ++sweep) {
        int i = first + sweep * stride;
        if (i < width) store_float8(to + i, unpack8<T>(held[sweep]), by);
    }
    for (int i = first + SWEEPS * stride; i < width; i += stride) {
        store_float8(to + i, unpack8<T>(activated(i, packed8<T>(gates + i), packed8<T>(ups + i))), by);
    }
    if (first == 0) made[row] = by.scale;
}

template <class T>
__device__ void quantized_norm(const typename T::Element* skip, const typename T::Element* update, const float* scales,
                               const float* weight_scales, const typename T::Element* weight, const float* given,
                               int width, float epsilon, u8* quantized, float* made, typename T::Element* sum) {
    i64 row = blockIdx.x, at = row * width;
    int stride = 8 * blockDim.x, first = 8 * threadIdx.x;
    Eight each = {}, of_norm = {};
    auto load_constants = [&](int i) {
        each = load8<Fp32>(weight_scales + i);
        of_norm = load8<T>(weight + i);
    };
    if (first < width) load_constants(first);
    begin_next();
    wait_for_previous();

    float scale = scales[row], squares = 0, largest = 0;
    // The stored sum, times the norm's weight. The row's largest value follows from it and from the norm.
    auto weighted = [&](int i) {
        Eight x = scaled8<T>(packed8<T>(update + at + i), scale, each), before = load8<T>(skip + at + i);
        round_to<T>(x);
#pragma unroll
        for (int j = 0; j < 8; ++j) x.at[j] += before.at[j];
        round_to<T>(x);
        store8<T>(sum + at + i, x);
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            squares += x.at[j] * x.at[j];
            x.at[j] *= of_norm.at[j];
        }
        enlarge(largest, x);
        return x;
    };
    Eight held;
    if (first < width) held = weighted(first);
    for (int i = first + stride; i < width; i += stride) {
        load_constants(i);
        weighted(i);
    }
    row_sum_and_max(squares, largest);
    float by = rsqrtf(squares / width + epsilon);
    Divisor to = divisor(rounded<T>(largest * by), given);
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
    if (threadIdx.x == 0) made[row] = to.scale;
}

// Apply the scales of a matmul in place, for readers without scales. The blocks of a row are neighbours.
template <class T>
__device__ void scale_matmul(const float* scales, const float* weight_scales, int width, typename T::Element* x) {
    int elements = 8 * blockDim.x, across = (width + elements - 1) / elements;
    i64 row = blockIdx.x / across;
    int i = blockIdx.x % across * elements + 8 * threadIdx.x;
    if (i >= width) return;
    x += row * width + i;
    store8<T>(x, scaled8<T>(packed8<T>(x), scales[row], load8<Fp32>(weight_scales + i)));
}

#define SWIGLU(NAME, T, SWEEPS, THREADS)                                                                               \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                              \
        quantized_swiglu_##SWEEPS##_##NAME(const T::Element* gate_up, const float* scales, const float* weight_scales, \
                                           const float* given, int width, u8* quantized, float* made) {                \
        quantized_swiglu<T, SWEEPS>(gate_up, scales, weight_scales, given, width, quantized, made);                    \
    }
#define FEW_ROWS(NAME, T, ROWS)                                                                                 \
    extern "C" __global__ void __launch_bounds__(MATMUL_THREADS, 2)                                             \
        few_rows_##ROWS##_##NAME(const u8* quantized, const float* scales, const u8* weight,                    \
                                 const float* weight_scales, int rows, int width, int inner, T::Element* out) { \
        few_rows<T, ROWS / 8>(quantized, scales, weight, weight_scales, rows, width, inner, out);               \
    }
#define KERNELS(NAME, T)                                                                                             \
    extern "C" __global__ void __launch_bounds__(512)                                                                \
        quantize_tokens_##NAME(const T::Element* x, const float* given, int width, u8* quantized, float* scales) {   \
        quantize_tokens<T>(x, given, width, quantized, scales);                                                      \
    }                                                                                                                \
    SWIGLU(NAME, T, 1, 512)                                                                                          \
    SWIGLU(NAME, T, 2, 1024)                                                                                         \
    SWIGLU(NAME, T, 4, 512)                                                                                          \
    FEW_ROWS(NAME, T, 8)                                                                                             \
    FEW_ROWS(NAME, T, 16)                                                                                            \
    extern "C" __global__ void __launch_bounds__(512)                                                                \
        quantized_norm_##NAME(const T::Element* skip, const T::Element* update, const float* scales,                 \
                              const float* weight_scales, const T::Element* weight, const float* given, int width,   \
                              float epsilon, u8* quantized, float* made, T::Element* sum) {                          \
        quantized_norm<T>(skip, update, scales, weight_scales, weight, given, width, epsilon, quantized, made, sum); \
    }                                                                                                                \
    extern "C" __global__ void __launch_bounds__(256)                                                                \
        scale_matmul_##NAME(const float* scales, const float* weight_scales, int width, T::Element* out) {           \
        scale_matmul<T>(scales, weight_scales, width, out);                                                          \
    }

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define IF_HOPPER(...) __VA_ARGS__
#else
#define IF_HOPPER(...)
#endif
#define ORDERED(NAME, T, ROWS, STAGES)                                                                                 \
    extern "C" __global__ void __launch_bounds__(256) few_ordered_##ROWS##_##STAGES##_##NAME(                          \
        const void* row_boxes, const float* scales, const u8* weight, const float* weight_scales, int rows, int width, \
        int inner, int slots, T::Element* out) {                                                                       \
        IF_HOPPER(few_ordered<T, ROWS / 8, STAGES>(row_boxes, scales, weight, weight_scales, rows, width, inner,       \
                                                   slots, out);)                                                       \
    }
#define ORDERED_KERNELS(NAME, T) ORDERED(NAME, T, 8, 6) ORDERED(NAME, T, 8, 8) ORDERED(NAME, T, 16, 6)

// Sums without scales have no room in float16.
IF_BF16(KERNELS(bf16, Bf16) ORDERED_KERNELS(bf16, Bf16))
IF_FP16(KERNELS(fp16, Fp16))
IF_FP32(KERNELS(fp32, Fp32) ORDERED_KERNELS(fp32, Fp32))
