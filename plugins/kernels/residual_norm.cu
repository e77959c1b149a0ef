// residual_norm: sum = x + update, rounded as it is stored, and its root-mean-square norm times a float32 weight.
//
// residual_norm_<dtype>: a block per token, so that a token has the same bits in any call.

#include "early.cuh"
#include "elements.cuh"
#include "reduce.cuh"
#include "variants.cuh"

constexpr int HELD = 2;  // vectors that a thread keeps in registers; it reads further ones again

template <int BYTES>
struct Word;
template <>
struct Word<16> {
    using Type = uint4;
};
template <>
struct Word<8> {
    using Type = uint2;
};
template <>
struct Word<4> {
    using Type = u32;
};

// N neighbouring elements as stored, which are read and written at once.
template <class T, int N>
struct Vector {
    using Element = typename T::Element;
    using Type = typename Word<N * sizeof(Element)>::Type;
    Type word;

    __device__ static Vector load(const Element* at) { return {*reinterpret_cast<const Type*>(at)}; }
    __device__ void store(Element* at) const { *reinterpret_cast<Type*>(at) = word; }
    __device__ float2 pair(int i) const { return T::load2(reinterpret_cast<const Element*>(&word) + 2 * i); }
    __device__ void set(int i, float2 x) { T::store2(reinterpret_cast<Element*>(&word) + 2 * i, x); }
};

template <class T, int N>
__device__ void residual_norm(const typename T::Element* x, const typename T::Element* update, const float* weight,
                              int width, float epsilon, typename T::Element* normed, typename T::Element* sum) {
    i64 at = static_cast<i64>(blockIdx.x) * width;
    int stride = N * blockDim.x, first = N * threadIdx.x;
    Vector<T, N> held[HELD], others[HELD];
    float2 weights[HELD][N / 2];
    float squares = 0;
    auto load_weights = [&](float2(&to)[N / 2], int i) {
#pragma unroll
        for (int p = 0; p < N / 2; ++p) to[p] = *reinterpret_cast<const float2*>(weight + i + 2 * p);
    };
    begin_next();
#pragma unroll
    for (int j = 0; j < HELD; ++j)
        if (first + j * stride < width) load_weights(weights[j], first + j * stride);
    wait_for_previous();
    // All loads before the first store, which the compiler does not pass: x and sum may be the same tensor.
#pragma unroll
    for (int j = 0; j < HELD; ++j) {
        int i = first + j * stride;
        if (i >= width) continue;
        held[j] = Vector<T, N>::load(x + at + i);
        others[j] = Vector<T, N>::load(update + at + i);
    }
    auto add = [&](int i, Vector<T, N> a, Vector<T, N> b) {
#pragma unroll
        for (int p = 0; p < N / 2; ++p) {
            float2 one = a.pair(p), other = b.pair(p);
            float2 both = T::rounded2(make_float2(one.x + other.x, one.y + other.y));
            a.set(p, both);
            squares = fmaf(both.x, both.x, fmaf(both.y, both.y, squares));
        }
        a.store(sum + at + i);
        return a;
    };
#pragma unroll
    for (int j = 0; j < HELD; ++j) {
        int i = first + j * stride;
        if (i < width) held[j] = add(i, held[j], others[j]);
    }
    for (int i = first + HELD * stride; i < width; i += stride)
        add(i, Vector<T, N>::load(x + at + i), Vector<T, N>::load(update + at + i));
    float scale = rsqrtf(__fdiv_rn(block_sum(squares), static_cast<float>(width)) + epsilon);
    auto store = [&](int i, Vector<T, N> both, const float2(&by)[N / 2]) {
#pragma unroll
        for (int p = 0; p < N / 2; ++p) {
            float2 value = both.pair(p);
            both.set(p, make_float2(value.x * scale * by[p].x, value.y * scale * by[p].y));
        }
        both.store(normed + at + i);
    };
#pragma unroll
    for (int j = 0; j < HELD; ++j) {
        int i = first + j * stride;
        if (i < width) store(i, held[j], weights[j]);
    }
    for (int i = first + HELD * stride; i < width; i += stride) {
        load_weights(weights[0], i);
        store(i, Vector<T, N>::load(sum + at + i), weights[0]);
    }
}

#define KERNEL(NAME, T)                                                                                     \
    extern "C" __global__ void __launch_bounds__(1024)                                                      \
        residual_norm_##NAME(const T::Element* x, const T::Element* update, const float* weight, int width, \
                             float epsilon, T::Element* normed, T::Element* sum) {                          \
        constexpr int WIDE = 16 / sizeof(T::Element);                                                       \
        if (width % WIDE == 0) residual_norm<T, WIDE>(x, update, weight, width, epsilon, normed, sum);      \
        else residual_norm<T, 2>(x, update, weight, width, epsilon, normed, sum);                           \
    }

IF_BF16(KERNEL(bf16, Bf16))
IF_FP16(KERNEL(fp16, Fp16))
IF_FP32(KERNEL(fp32, Fp32))
