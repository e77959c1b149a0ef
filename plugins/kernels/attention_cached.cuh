// What a cache holds of keys and values, and how tensor cores multiply tiles of it: the element types of attention.
#pragma once

#include "elements.cuh"

// The cache holds what the layer computes in.
template <class T>
struct AsComputed : T {
    using Cached = typename T::Element;
    using Tile = T;  // what queries, weights and tiles are multiplied in
    static constexpr bool FLOAT8 = false;

    static __device__ float2 load_cached2(const Cached* at) { return T::load2(at); }
    static __device__ void store_cached2(Cached* at, float2 x, float) { T::store2(at, x); }

    // The first of the two columns of a head that a thread has in part `c` of its fragment of queries.
    static __device__ int column(int c) { return 8 * c + 2 * (threadIdx.x % 4); }

    // Scores of twice eight keys, by what load_matrices gives of 16 columns.
    template <int N>
    static __device__ void score(float (&low)[4], float (&high)[4], const u32 (&q)[N][4], int k, const u32 (&keys)[4]) {
        T::product(low, q[k], keys[0], keys[1]);
        T::product(high, q[k], keys[2], keys[3]);
    }
    // Add 16 values, weighted, by what load_transposed gives of 16 columns.
    template <int N>
    static __device__ void add_values(float (&sum)[N][4], const u32 (&weight)[4], int d, const u32 (&values)[4]) {
        T::product(sum[2 * d], weight, values[0], values[1]);
        T::product(sum[2 * d + 1], weight, values[2], values[3]);
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
    using Type = Fp16;  // which has every number of float8_e4m3fn, and there is an instruction for it
};
template <>
struct TileOfFloat8<Fp32> {
    using Type = Fp32;
};

// The cache holds bytes of float8_e4m3fn, over a scale; tensor cores get them in float16. They need compute capability
// 8.9: kernels for older ones are empty.
template <class T>
struct InFloat8 : T {
    using Cached = u8;
    using Tile = typename TileOfFloat8<T>::Type;
    static constexpr bool FLOAT8 = true;

    // Four numbers of float8 as float16.
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
    static __device__ void store_cached2(u8* at, float2 x, float scale) {
        u16 bits = 0;
#if __CUDA_ARCH__ >= 890
        x = make_float2(__fdividef(x.x, scale), __fdividef(x.y, scale));
        asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(bits) : "f"(x.y), "f"(x.x));
#endif
        *reinterpret_cast<u16*>(at) = bits;
    }

    // A thread has four columns side by side of what is loaded as two elements of 16 bits; a sum of products knows no
    // order, so queries have theirs in the same places.
    static __device__ int column(int c) { return c / 2 * 16 + 4 * (threadIdx.x % 4) + 2 * (c % 2); }

    // As above, of 32 columns.
    template <int N>
    static __device__ void score(float (&low)[4], float (&high)[4], const u32 (&q)[N][4], int k, const u32 (&keys)[4]) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            uint2 first = widened(keys[i]), second = widened(keys[2 + i]);
            Tile::product(low, q[2 * k + i], first.x, first.y);
            Tile::product(high, q[2 * k + i], second.x, second.y);
        }
    }
    // Of two keys a thread has two columns each: sums 2b have the even columns of 16, sums 2b + 1 the odd ones.
    template <int N>
    static __device__ void add_values(float (&sum)[N][4], const u32 (&weight)[4], int d, const u32 (&values)[4]) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            uint2 first = widened(__byte_perm(values[2 * i], 0, 0x3120));
            uint2 second = widened(__byte_perm(values[2 * i + 1], 0, 0x3120));
            Tile::product(sum[4 * d + 2 * i], weight, first.x, second.x);
            Tile::product(sum[4 * d + 2 * i + 1], weight, first.y, second.y);
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
