// Weights in 4 bits as numbers, for products of so many rows that reading them is a small part.
#pragma once
#include "int4.cuh"

// A thread takes the 16 bytes that lie together: eight inputs of each of four groups of 32.
template <class T>
__device__ void int4_weights(
    const u8* weight, const u16* scales, const u8* zeros, int width, int inner, int shift, u16* numbers
) {
    int chunks = (inner + INT4_CHUNK - 1) / INT4_CHUNK, blocks = chunks * 4 >> shift;
    i64 unit = blockIdx.x * static_cast<i64>(blockDim.x) + threadIdx.x, output = unit / (4 * chunks);
    int chunk = unit / 4 % chunks, part = unit % 4;
    if (output >= width) return;
    uint4 words = load_once(weight + 16 * unit);
    uint2 by = spread_scales(load_scales(scales + output * blocks, chunk, shift), shift);
    u32 middles = zeros ? load_zeros(zeros + output * ((blocks + 1) / 2), chunk, shift) : 0x8888;
#pragma unroll
    for (int group = 0; group < 4; ++group) {
        int k = INT4_CHUNK * chunk + 32 * group + 8 * part;
        if (k >= inner) return;
        float scale = scale_of<T>(by, group), middle = Nibbles<T>::number(middles >> (4 * group) & 15);
        float low[4], high[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            float2 two = T::unpack(Nibbles<T>::pair(word(words, group), i));
            low[i] = (two.x - middle) * scale;
            high[i] = (two.y - middle) * scale;
        }
        uint4 made = make_uint4(T::pack(make_float2(low[0], low[1])), T::pack(make_float2(low[2], low[3])),
                                T::pack(make_float2(high[0], high[1])), T::pack(make_float2(high[2], high[3])));
        *reinterpret_cast<uint4*>(numbers + output * inner + k) = made;
    }
}
