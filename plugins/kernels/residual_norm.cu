// residual_norm: sum = x + update, rounded as it is stored, and its root-mean-square norm times a float32 weight.
//
// residual_norm_<dtype>: a block of 256 threads per token, so that a token has the same bits in any call.

#include "early.cuh"
#include "elements.cuh"
#include "reduce.cuh"
#include "variants.cuh"

constexpr int HELD = 8;  // pairs that a thread keeps in registers; it reads further ones again

template <class T>
__device__ void residual_norm(const typename T::Element* x, const typename T::Element* update, const float* weight,
                              int width, float epsilon, typename T::Element* normed, typename T::Element* sum) {
    i64 at = static_cast<i64>(blockIdx.x) * width;
    int stride = 2 * blockDim.x, first = 2 * threadIdx.x;
    float2 held[HELD], others[HELD], weights[HELD];
    float squares = 0;
    begin_next();
#pragma unroll
    for (int j = 0; j < HELD; ++j) {
        int i = first + j * stride;
        if (i < width) weights[j] = *reinterpret_cast<const float2*>(weight + i);
    }
    wait_for_previous();
    // All loads before the first store, which the compiler does not pass: x and sum may be the same tensor.
#pragma unroll
    for (int j = 0; j < HELD; ++j) {
        int i = first + j * stride;
        if (i >= width) continue;
        held[j] = T::load2(x + at + i);
        others[j] = T::load2(update + at + i);
    }
    auto add = [&](int i, float2 a, float2 b) {
        float2 both = T::rounded2(make_float2(a.x + b.x, a.y + b.y));
        T::store2(sum + at + i, both);
        squares = fmaf(both.x, both.x, fmaf(both.y, both.y, squares));
        return both;
    };
#pragma unroll
    for (int j = 0; j < HELD; ++j) {
        int i = first + j * stride;
        if (i < width) held[j] = add(i, held[j], others[j]);
    }
    for (int i = first + HELD * stride; i < width; i += stride) add(i, T::load2(x + at + i), T::load2(update + at + i));
    float scale = rsqrtf(__fdiv_rn(block_sum(squares), static_cast<float>(width)) + epsilon);
    auto store = [&](int i, float2 both, float2 by) {
        T::store2(normed + at + i, make_float2(both.x * scale * by.x, both.y * scale * by.y));
    };
#pragma unroll
    for (int j = 0; j < HELD; ++j) {
        int i = first + j * stride;
        if (i < width) store(i, held[j], weights[j]);
    }
    for (int i = first + HELD * stride; i < width; i += stride)
        store(i, T::load2(sum + at + i), *reinterpret_cast<const float2*>(weight + i));
}

#define KERNEL(NAME, T)                                                                                               \
    extern "C" __global__ void __launch_bounds__(256) residual_norm_##NAME(                                           \
        const T::Element* x, const T::Element* update, const float* weight, int width, float epsilon,                 \
        T::Element* normed, T::Element* sum) {                                                                        \
        residual_norm<T>(x, update, weight, width, epsilon, normed, sum);                                             \
    }

IF_BF16(KERNEL(bf16, Bf16))
IF_FP16(KERNEL(fp16, Fp16))
IF_FP32(KERNEL(fp32, Fp32))
