// Element types of attention: the keys and values of a cache, and how tensor cores multiply tiles of it.
#pragma once

#include "elements.cuh"

// The cache has the compute dtype of the layer.
template <class T>
struct AsComputed : T {
    using Cached = typename T::Element;
    using Tile = T;  // dtype of queries, weights and tiles in multiplications
    static constexpr bool FLOAT8 = false;

    static __device__ float2 load_cached2(const Cached* at) { return T::load2(at); }
    static __device__ void store_cached2(Cached* at, float2 x, float) { T::store2(at, x); }

    // The first of the two columns of a head that a thread holds in part `c` of its query fragment.
    static __device__ int column(int c) { return 8 * c + 2 * (threadIdx.x % 4); }

    // Scores of twice eight keys, from the result of load_matrices for 16 columns.
    template <int N>
    static __device__ void score(float (&low)[4], float (&high)[4], const u32 (&q)[N][4], int k, const u32 (&keys)[4]) {
        T::mma(low, q[k], keys[0], keys[1]);
        T::mma(high, q[k], keys[2], keys[3]);
    }
    // Add 16 weighted values, from the result of load_transposed for 16 columns.
    template <int N>
    static __device__ void add_values(float (&sum)[N][4], const u32 (&weight)[4], int d, const u32 (&values)[4]) {
        T::mma(sum[2 * d], weight, values[0], values[1]);
        T::mma(sum[2 * d + 1], weight, values[2], values[3]);
    }
    // Write a thread's columns of a row, times `by`.
    template <int D>
    static __device__ void spread(float* to, const float (&sum)[D / 8][4], int half, float by) {
#pragma unroll
        for (int n = 0; n < D / 8; ++n)
            *reinterpret_cast<float2*>(to + column(n)) = make_float2(sum[n][2 * half] * by, sum[n][2 * half + 1] * by);
    }
};

template <class T>
struct TileOfFloat8 {
    using Type = Fp16;  // which represents every number of float8_e4m3fn, and has an instruction for the conversion
};
template <>
struct TileOfFloat8<Fp32> {
    using Type = Fp32;
};

// The cache holds scaled float8_e4m3fn bytes; tensor cores receive them as float16. They need compute capability 8.9:
// kernels for older GPUs are empty.
template <class T>
struct InFloat8 : T {
    using Cached = u8;
    using Tile = typename TileOfFloat8<T>::Type;
    static constexpr bool FLOAT8 = true;

    // Four float8 numbers as float16.
    static __device__ uint2 widened(u32 bits) {
        uint2 made = make_uint2(0, 0);
#if __CUDA_ARCH__ >= 890
        asm("{ .reg .b16 low, high; mov.b32 {low, high}, %2;\n"
            "cvt.rn.f16x2.e4m3x2 %0, low;\n"
            "cvt.rn.f16x2.e4m3x2 %1, high; }"
            : "=r"(made.x), "=r"(made.y)
            : "r"(bits));
#endif
        return made;
    }
    static __device__ float2 load_cached2(const u8* at) {
        return Fp16::unpack(widened(*reinterpret_cast<const u16*>(at)).x);
    }
    // Eight numbers, times `scale`, in a 16-bit compute dtype; zeros where `there` is false.
    static __device__ void widen8(u16* to, uint2 bits, bool there, float scale) {
        uint4 made = make_uint4(0, 0, 0, 0);
        if (there) {
            uint2 a = widened(bits.x), b = widened(bits.y);
            made = make_uint4(scaled2(a.x, scale), scaled2(a.y, scale), scaled2(b.x, scale), scaled2(b.y, scale));
        }
        *reinterpret_cast<uint4*>(to) = made;
    }
    static __device__ u32 scaled2(u32 halves, float scale) {
        float2 x = Fp16::unpack(halves);
        return T::pack(make_float2(x.x * scale, x.y * scale));
    }
    static __device__ void store_cached2(u8* at, float2 x, float scale) {
        u16 bits = 0;
#if __CUDA_ARCH__ >= 890
        x = make_float2(__fdividef(x.x, scale), __fdividef(x.y, scale));
        asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(bits) : "f"(x.y), "f"(x.x));
#endif
        *reinterpret_cast<u16*>(at) = bits;
    }

    // A thread has four neighbouring columns of data loaded as two 16-bit elements. The order of a sum's terms does not
    // matter, so queries are arranged in the same places.
    static __device__ int column(int c) { return c / 2 * 16 + 4 * (threadIdx.x % 4) + 2 * (c % 2); }

    // As above, for 32 columns.
    template <int N>
    static __device__ void score(float (&low)[4], float (&high)[4], const u32 (&q)[N][4], int k, const u32 (&keys)[4]) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            uint2 first = widened(keys[i]), second = widened(keys[2 + i]);
            Tile::mma(low, q[2 * k + i], first.x, first.y);
            Tile::mma(high, q[2 * k + i], second.x, second.y);
        }
    }
    // A thread has two columns each of two keys: sums 2b hold the even columns of 16, sums 2b + 1 the odd ones.
    template <int N>
    static __device__ void add_values(float (&sum)[N][4], const u32 (&weight)[4], int d, const u32 (&values)[4]) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            uint2 first = widened(__byte_perm(values[2 * i], 0, 0x3120));
            uint2 second = widened(__byte_perm(values[2 * i + 1], 0, 0x3120));
            Tile::mma(sum[4 * d + 2 * i], weight, first.x, second.x);
            Tile::mma(sum[4 * d + 2 * i + 1], weight, first.y, second.y);
        }
    }
    template <int D>
    static __device__ void spread(float* to, const float (&sum)[D / 8][4], int half, float by) {
#pragma unroll
        for (int b = 0; b < D / 16; ++b) {
            const float *even = sum[2 * b] + 2 * half, *odd = sum[2 * b + 1] + 2 * half;
            *reinterpret_cast<float4*>(to + column(2 * b)) =
                make_float4(even[0] * by, odd[0] * by, even[1] * by, odd[1] * by);
        }
    }
};
