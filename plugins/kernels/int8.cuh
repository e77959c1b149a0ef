// 8-bit integers: a word holds four inputs of one output, in order. The zero point is 128.
#pragma once
#include "integer_groups.cuh"

// Bytes i and i + 1 of a word, for i = 0 or 2, as two numbers minus 128.
template <class T>
struct Bytes;

template <>
struct Bytes<Bf16> {
    // The last seven bits b give 128 + b. The first bit is the last one of the exponent of -256, which it makes -128.
    static __device__ __forceinline__ u32 pair(u32 word, int i) {
        u32 two = __byte_perm(word, 0, i ? 0x4342 : 0x4140), numbers;
        u32 raised = masked_or(two, 0x007f007fu, 0x43004300u), minus = (two & 0x00800080u) ^ 0xc380c380u;
        asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(numbers) : "r"(raised), "r"(0x3f803f80u), "r"(minus));
        return numbers;
    }
};

template <>
struct Bytes<Fp16> {
    static __device__ __forceinline__ u32 pair(u32 word, int i) {  // 1024 + byte, minus 1152
        u32 raised = __byte_perm(word, 0x64646464u, i ? 0x4342 : 0x4140), numbers;
        asm("add.rn.f16x2 %0, %1, %2;" : "=r"(numbers) : "r"(raised), "r"(0xe480e480u));
        return numbers;
    }
};

template <class T>
struct Int8 : IntegerGroups<T, false> {
    static constexpr int LOADS = 2;

    __device__ __forceinline__ u32 operand(const typename Int8::Held&, int, int) const { return 0; }

    static __device__ __forceinline__ u32 pair(const uint4& words, int group, int i, u32) {
        return Bytes<T>::pair(word(words, 2 * group + i / 2), i % 2 * 2);
    }
};
