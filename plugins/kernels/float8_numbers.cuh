// 8-bit floats (e4m3) that are not multiplied as such: a word holds four inputs of one output, in order.
#pragma once
#include "float4.cuh"

// Bytes i and i + 1 of a word, for i = 0 or 2, as two numbers. Their bits give numbers that are too small by a power of
// 2, which a product restores without rounding.
template <class T>
struct Eights;

template <>
struct Eights<Bf16> {
    static __device__ __forceinline__ u32 pair(u32 word, int i) {
        u32 two = __byte_perm(word, 0, i ? 0x3424 : 0x1404);
        return Floats<Bf16>::times(masked_or(two >> 4, 0x07f007f0u, two & 0x80008000u), 0x7b807b80u);  // 2^120
    }
};

template <>
struct Eights<Fp16> {
    static __device__ __forceinline__ u32 pair(u32 word, int i) {
        u32 two = __byte_perm(word, 0, i ? 0x3424 : 0x1404);
        return Floats<Fp16>::times(masked_or(two >> 1, 0x3f803f80u, two & 0x80008000u), 0x5c005c00u);  // 2^8
    }
};

// With a float32 scale per 128 inputs of an output, which is applied to their sum.
template <class T_>
struct Float8 {
    using T = T_;
    using Scale = float;
    using More = u8;
    using Held = float;
    static constexpr int LOADS = 2;
    static constexpr bool SCALES_NUMBERS = false, MINIMA = false;
    static constexpr int GROUP = 32;
    const Scale* scales;
    const More* none;
    int shift;

    __device__ __forceinline__ int stored(int inner) const { return chunks_of(inner); }
    __device__ __forceinline__ Held load(i64 output_at, int chunk) const { return __ldg(scales + output_at + chunk); }
    __device__ __forceinline__ Held select(Held held, int) const { return held; }
    __device__ __forceinline__ u32 operand(Held, int, int) const { return 0; }
    static __device__ __forceinline__ u32 pair(const uint4& words, int group, int i, u32) {
        return Eights<T>::pair(word(words, 2 * group + i / 2), i % 2 * 2);
    }
    static __device__ __forceinline__ float scale(Held held, int) { return held; }
    __device__ __forceinline__ float factor(int) const { return 1; }
};
