// 4-bit weights in the order of plugins/operators/int4_layout.py: a word holds eight inputs of one output; pair i
// (inputs 2i and 2i + 1) is in nibbles i and i + 4.
#pragma once
#include "elements.cuh"
#include "intrinsics.cuh"

constexpr int INT4_CHUNK = 128;  // inputs of an output that lie together: four groups, in 64 bytes

// Two nibbles become two numbers: as the last bits of BASE, whose last place is 1, they give BASE + nibble. One exact
// sum then subtracts BASE and the zero point.
__device__ __forceinline__ u32 raised(u32 word, int i, u32 base) {
    u32 numbers;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(numbers) : "r"(word >> (4 * i)), "r"(0x000f000fu), "r"(base));
    return numbers;
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

__device__ __forceinline__ u32 word(const uint4& words, int i) {
    return i == 0 ? words.x : i == 1 ? words.y : i == 2 ? words.z : words.w;
}

__device__ __forceinline__ uint4 load_once(const u8* at) {
    uint4 x;
    asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "l"(at));
    return x;
}

// 1 << shift groups of 32 inputs share a scale. Scales of an output, and its zero points, are read four at a time;
// those of a chunk are among the four from here on.
__device__ __forceinline__ int first_scale(int chunk, int shift) { return (4 * chunk >> shift) & ~3; }

__device__ __forceinline__ int scales_of_output(int inner, int shift) {
    int groups = (inner + INT4_CHUNK - 1) / INT4_CHUNK * 4;
    return (((groups + (1 << shift) - 1) >> shift) + 3) & ~3;
}

// Select, from the four scales read, those of the chunk's four groups.
__device__ __forceinline__ uint2 scales_of_groups(uint2 four, int chunk, int shift) {
    u32 first = shift == 0 ? 0x3210u : shift == 1 ? 0x1010u + 0x4444u * (chunk % 2) : 0x1010u + 0x2222u * (chunk % 4);
    u32 second = shift == 0 ? 0x7654u : shift == 1 ? first + 0x2222u : first;
    return make_uint2(__byte_perm(four.x, four.y, first), __byte_perm(four.x, four.y, second));
}

template <class T>
__device__ __forceinline__ float scale_of(uint2 scales, int group) {
    float2 two = T::unpack(group < 2 ? scales.x : scales.y);
    return group % 2 ? two.y : two.x;
}

__device__ __forceinline__ u32 zero_of(u32 four, int chunk, int group, int shift) {
    return four >> (4 * ((4 * chunk + group >> shift) & 3)) & 15;
}
