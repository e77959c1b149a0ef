// Weights of 4 or 8 bits in the order of plugins/operators/int4_layout.py and int8_layout.py. A format is a struct that
// turns the words of a thread into numbers: Int4, Int8, Float4 and KQuants. GROUP: the inputs of which a tensor core
// instruction has some: 32, or all 16. MINIMA: the format subtracts a number per group from its values.
#pragma once
#include "elements.cuh"
#include "intrinsics.cuh"

constexpr int CHUNK_INPUTS = 128;  // inputs of an output that lie together: four groups of 32

// (word & mask) | base, one instruction.
__device__ __forceinline__ u32 masked_or(u32 word, u32 mask, u32 base) {
    u32 bits;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(bits) : "r"(word), "r"(mask), "r"(base));
    return bits;
}

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

__device__ __forceinline__ int chunks_of(int inner) { return (inner + CHUNK_INPUTS - 1) / CHUNK_INPUTS; }
