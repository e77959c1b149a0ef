// Dequantized 4-bit weights, for matmuls of so many rows that reading the weight is a small part of the work.
#pragma once
#include "int4.cuh"

// A thread takes 16 bytes: eight inputs of each of four groups of 32.
template <class T>
__device__ void int4_weights(
    const u8* weight, const u16* scales, const u8* zeros, int width, int inner, int shift, u16* numbers
) {
    int chunks = (inner + INT4_CHUNK - 1) / INT4_CHUNK;
    i64 unit = blockIdx.x * static_cast<i64>(blockDim.x) + threadIdx.x, output = unit / (4 * chunks);
    int chunk = unit / 4 % chunks, part = unit % 4;
    if (output >= width) return;
    uint4 words = load_once(weight + 16 * unit);
    i64 at = output * scales_of_output(inner, shift) + first_scale(chunk, shift);
    uint2 by = scales_of_groups(__ldg(reinterpret_cast<const uint2*>(scales + at)), chunk, shift);
    u32 middles = zeros ? __ldg(reinterpret_cast<const u16*>(zeros + at / 2)) : 0x8888;
#pragma unroll
    for (int group = 0; group < 4; ++group) {
        int k = INT4_CHUNK * chunk + 32 * group + 8 * part;
        if (k >= inner) return;
        float scale = scale_of<T>(by, group);
        u32 made[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            float2 two = T::unpack(Nibbles<T>::pair(word(words, group), i, zero_of(middles, chunk, group, shift)));
            made[i] = T::pack(make_float2(two.x * scale, two.y * scale));
        }
        *reinterpret_cast<uint4*>(numbers + output * inner + k) = make_uint4(made[0], made[1], made[2], made[3]);
    }
}
