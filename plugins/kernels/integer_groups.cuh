// Scales and zero points of integer weights: 1 << shift groups of 32 inputs share one. Those of an output are read four
// at a time; those of a chunk are among the four from first_scale on.
#pragma once
#include "low_bit.cuh"

__device__ __forceinline__ int first_scale(int chunk, int shift) { return (4 * chunk >> shift) & ~3; }

__device__ __forceinline__ int scales_of_output(int inner, int shift) {
    int groups = 4 * chunks_of(inner);
    return (((groups + (1 << shift) - 1) >> shift) + 3) & ~3;
}

// Select, from the four scales read, those of the chunk's four groups.
__device__ __forceinline__ uint2 scales_of_groups(uint2 four, int chunk, int shift) {
    u32 first = shift == 0 ? 0x3210u : shift == 1 ? 0x1010u + 0x4444u * (chunk % 2) : 0x1010u + 0x2222u * (chunk % 4);
    u32 second = shift == 0 ? 0x7654u : shift == 1 ? first + 0x2222u : first;
    return make_uint2(__byte_perm(four.x, four.y, first), __byte_perm(four.x, four.y, second));
}

__device__ __forceinline__ u32 zero_of(u32 four, int chunk, int group, int shift) {
    return four >> (4 * ((4 * chunk + group >> shift) & 3)) & 15;
}

// What integer formats share. The scale of a group is applied to its sum, so no number is rounded.
template <class T_, bool ZEROS>
struct IntegerGroups {
    using T = T_;
    using Scale = u16;
    using More = u8;
    static constexpr bool SCALES_NUMBERS = false, MINIMA = false;
    static constexpr int GROUP = 32;
    const Scale* scales;
    const More* zeros;  // two per byte; without ZEROS all are the middle
    int shift;

    struct Held {
        uint2 scales;
        u32 zeros;
    };

    __device__ __forceinline__ int stored(int inner) const { return scales_of_output(inner, shift); }

    __device__ __forceinline__ void advance(i64 outputs, int stored) {
        scales += outputs * stored;
        if (ZEROS) zeros += outputs * stored / 2;
    }

    __device__ __forceinline__ Held load(i64 output_at, int chunk) const {
        i64 at = output_at + first_scale(chunk, shift);
        Held held;
        held.scales = __ldg(reinterpret_cast<const uint2*>(scales + at));
        if (ZEROS) held.zeros = __ldg(reinterpret_cast<const u16*>(zeros + at / 2));
        return held;
    }

    __device__ __forceinline__ Held select(Held held, int chunk) const {
        held.scales = scales_of_groups(held.scales, chunk, shift);
        return held;
    }

    static __device__ __forceinline__ float scale(const Held& held, int group) {
        float2 two = T::unpack(group < 2 ? held.scales.x : held.scales.y);
        return group % 2 ? two.y : two.x;
    }

    __device__ __forceinline__ float factor(int) const { return 1; }
};
