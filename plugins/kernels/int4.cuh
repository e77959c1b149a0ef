// 4-bit integers: a word holds eight inputs of one output; pair i (inputs 2i and 2i + 1) is in nibbles i and i + 4.
#pragma once
#include "integer_groups.cuh"

// Two nibbles become two numbers: as the last bits of BASE, whose last place is 1, they give BASE + nibble. One exact
// sum then subtracts BASE and the zero point.
__device__ __forceinline__ u32 raised(u32 word, int i, u32 base) {
    return masked_or(word >> (4 * i), 0x000f000fu, base);
}

template <class T>
struct Nibbles;

template <>
struct Nibbles<Bf16> {
    static __device__ __forceinline__ u32 pair(u32 word, int i, u32 middle) {
        u32 minus = middle * 0x10001u | 0xc300c300u, numbers;
        asm("fma.rn.bf16x2 %0, %1, %2, %3;"
            : "=r"(numbers)
            : "r"(raised(word, i, 0x43004300u)), "r"(0x3f803f80u), "r"(minus));
        return numbers;
    }
};

template <>
struct Nibbles<Fp16> {
    static __device__ __forceinline__ u32 pair(u32 word, int i, u32 middle) {
        u32 minus = middle * 0x10001u | 0xe400e400u, numbers;
        asm("add.rn.f16x2 %0, %1, %2;" : "=r"(numbers) : "r"(raised(word, i, 0x64006400u)), "r"(minus));
        return numbers;
    }
};

template <class T, bool ZEROS>
struct Int4 : IntegerGroups<T, ZEROS> {
    static constexpr int LOADS = 1;  // of 16 bytes, by which a thread gets its part of a chunk

    __device__ __forceinline__ u32 operand(const typename Int4::Held& held, int chunk, int group) const {
        return ZEROS ? zero_of(held.zeros, chunk, group, this->shift) : 8;
    }

    static __device__ __forceinline__ u32 pair(const uint4& words, int group, int i, u32 zero) {
        return Nibbles<T>::pair(word(words, group), i, zero);
    }
};
