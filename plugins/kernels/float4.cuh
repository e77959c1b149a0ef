// 4-bit floats (e2m1) in the order of plugins/operators/float4.py, with a float8_e4m3fn scale per 16 or 32 inputs and a
// float32 factor per output. A number times its scale has at most 6 significant bits, so it is exact in 16 bits.
#pragma once
#include "low_bit.cuh"

// The exponent bits of a number and of a scale lie in those of T, so both are too small by powers of 2. The scale is
// multiplied by some of them; FACTOR is what is left of the product.
template <class T>
struct Floats;

template <>
struct Floats<Bf16> {
    static constexpr float FACTOR = 0x1p20f;  // of 2^126 and 2^120
    static constexpr int EXPONENT = 6;        // bits by which bit 0 of a number moves

    static __device__ __forceinline__ u32 times(u32 a, u32 b) {
        u32 product;
        asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(product) : "r"(a), "r"(b), "r"(0x80008000u));
        return product;
    }
    static __device__ __forceinline__ u32 scale(u32 bytes) {  // times 2^226
        return times(times(bytes << 4, 0x78007800u), 0x78007800u);
    }
};

template <>
struct Floats<Fp16> {
    static constexpr float FACTOR = 0x1p7f;  // of 2^14 and 2^8
    static constexpr int EXPONENT = 9;

    static __device__ __forceinline__ u32 times(u32 a, u32 b) {
        u32 product;
        asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
        return product;
    }
    static __device__ __forceinline__ u32 scale(u32 bytes) { return times(bytes << 7, 0x78007800u); }  // times 2^15
};

template <class T_, int SHIFT>  // 1 << SHIFT groups of 16 inputs share a scale
struct Float4 {
    using T = T_;
    using Scale = u8;
    using More = float;
    using Held = uint2;  // the scales of a chunk; selected: those of a thread's inputs in its four groups of 32
    static constexpr int LOADS = 1;
    static constexpr bool SCALES_NUMBERS = true, MINIMA = false;
    static constexpr int GROUP = 32;
    const Scale* scales;
    const More* factors;
    int shift;  // SHIFT

    __device__ __forceinline__ int stored(int inner) const { return chunks_of(inner) * 8 >> SHIFT; }

    __device__ __forceinline__ void advance(i64 outputs, int stored) {
        scales += outputs * stored;
        factors += outputs;
    }

    __device__ __forceinline__ Held load(i64 output_at, int chunk) const {
        if (SHIFT) return make_uint2(__ldg(reinterpret_cast<const u32*>(scales + output_at + 4 * chunk)), 0);
        return __ldg(reinterpret_cast<const uint2*>(scales + output_at + 8 * chunk));
    }

    // A thread has inputs 8p to 8p + 7 of each group of 32, for p = lane % 4, so one half of the group of 32.
    __device__ __forceinline__ u32 select(Held held, int) const {
        return SHIFT ? held.x : __byte_perm(held.x, held.y, threadIdx.x & 2 ? 0x7531 : 0x6420);
    }

    // The scale of a group of 32, twice. Those of two groups become numbers at once.
    __device__ __forceinline__ u32 operand(u32 held, int, int group) const {
        u32 scales = Floats<T>::scale(__byte_perm(held, 0, group < 2 ? 0x4140 : 0x4342));
        return __byte_perm(scales, 0, group % 2 ? 0x3232 : 0x1010);
    }

    // Sign and magnitude move to their places in Bf16 by a rotation, or by a product whose terms do not meet there.
    static __device__ __forceinline__ u32 pair(const uint4& words, int group, int i, u32 scale) {
        constexpr int FURTHER = Floats<T>::EXPONENT - Floats<Bf16>::EXPONENT;
        constexpr u32 MAGNITUDES = 0x00070007u << Floats<T>::EXPONENT, SIGNS = 0x80008000u;
        u32 of = word(words, group);
        u32 placed = i < 3 ? __funnelshift_r(of, of, 3 * i) : (of & 0x001b001bu) * (1u << 12 | 1u << 7 | 1u << 2);
        u32 bits = FURTHER ? masked_or(placed, SIGNS, placed << FURTHER & MAGNITUDES) : placed & (MAGNITUDES | SIGNS);
        return Floats<T>::times(bits, scale);
    }

    static __device__ __forceinline__ float scale(u32, int) { return 1; }
    __device__ __forceinline__ float factor(int output) const { return __ldg(factors + output) * Floats<T>::FACTOR; }
};
