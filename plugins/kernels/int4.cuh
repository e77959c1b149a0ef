// Weights in 4 bits, in the order of plugins/reference/int4.py: a word holds eight inputs of one output.
#pragma once
#include "elements.cuh"
#include "intrinsics.cuh"

constexpr int INT4_CHUNK = 128;  // inputs of an output that lie together: four groups, in 64 bytes

// Two nibbles become two numbers by being the last bits of one that counts in ones: BASE + nibble.
template <class T>
struct Nibbles;

template <>
struct Nibbles<Bf16> {
    static constexpr u32 BASE_BITS = 0x43004300u;
    static constexpr u32 MINUS_ONE = 0xbf80bf80u, MINUS_MIDDLE = 0xc308c308u;  // -(BASE + 8)
    static __device__ u32 pair(u32 word, int i) { return (word >> (4 * i)) & 0x000f000fu | BASE_BITS; }
    static __device__ float number(u32 nibble) { return __uint_as_float(0x43000000u | nibble << 16); }
};

template <>
struct Nibbles<Fp16> {
    static constexpr u32 BASE_BITS = 0x64006400u;
    static constexpr u32 MINUS_ONE = 0xbc00bc00u, MINUS_MIDDLE = 0xe408e408u;
    static __device__ u32 pair(u32 word, int i) { return (word >> (4 * i)) & 0x000f000fu | BASE_BITS; }
    static __device__ float number(u32 nibble) { return __uint_as_float(0x44800000u | nibble << 13); }
};

// Eight inputs as Nibbles::pair gives those of a weight: i and i + 4.
__device__ __forceinline__ uint4 in_pairs(uint4 x) {
    return make_uint4(__byte_perm(x.x, x.z, 0x5410), __byte_perm(x.x, x.z, 0x7632), __byte_perm(x.y, x.w, 0x5410),
                      __byte_perm(x.y, x.w, 0x7632));
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

// The scales of a chunk's four groups of 32 inputs, of which 1 << shift share one: so many as there are.
__device__ __forceinline__ uint2 load_scales(const u16* scales, int chunk, int shift) {
    const u16* at = scales + (4 * chunk >> shift);
    if (shift == 0) return __ldg(reinterpret_cast<const uint2*>(at));
    if (shift == 1) return make_uint2(__ldg(reinterpret_cast<const u32*>(at)), 0);
    return make_uint2(__ldg(at), 0);
}

// One for each group.
__device__ __forceinline__ uint2 spread_scales(uint2 stored, int shift) {
    if (shift == 1) return make_uint2(__byte_perm(stored.x, 0, 0x1010), __byte_perm(stored.x, 0, 0x3232));
    if (shift == 2) stored.x = stored.y = __byte_perm(stored.x, 0, 0x1010);
    return stored;
}

template <class T>
__device__ __forceinline__ float scale_of(uint2 scales, int group) {
    float2 two = T::unpack(group < 2 ? scales.x : scales.y);
    return group % 2 ? two.y : two.x;
}

// The zero points of the groups, a nibble each.
__device__ __forceinline__ u32 load_zeros(const u8* zeros, int chunk, int shift) {
    u32 found = 0;
#pragma unroll
    for (int group = 0; group < 4; ++group) {
        int block = (4 * chunk + group) >> shift;
        found |= (zeros[block / 2] >> (4 * (block % 2)) & 15) << (4 * group);
    }
    return found;
}
