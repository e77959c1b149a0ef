// Dequantized weights, for matmuls of so many rows that reading the weight is a small part of the work.
#pragma once
#include "low_bit.cuh"

// A thread takes 16 bytes: eight inputs of each of some groups of 32 (low_bit_matmul.cuh has their order).
template <class Format>
__device__ void low_bit_weights(const u8* weight, Format format, int width, int inner, u16* numbers) {
    using T = typename Format::T;
    constexpr int LOADS = Format::LOADS, GROUPS = 4 / LOADS;
    int chunks = chunks_of(inner);
    i64 unit = blockIdx.x * static_cast<i64>(blockDim.x) + threadIdx.x, output = unit / (4 * LOADS * chunks);
    int chunk = unit / (4 * LOADS) % chunks, load = unit / 4 % LOADS, part = unit % 4;
    if (output >= width) return;
    uint4 words = load_once(weight + 16 * unit);
    auto held = format.select(format.load(output * format.stored(inner), chunk), chunk);
    float factor = format.factor(output);
#pragma unroll
    for (int i = 0; i < GROUPS; ++i) {
        int group = GROUPS * load + i, k = CHUNK_INPUTS * chunk + 32 * group + Format::GROUP / 4 * part;
        if (k >= inner) return;
        u32 operand = format.operand(held, chunk, group), made[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            int of = Format::GROUP == 16 ? 2 * group + j / 2 : group;
            float scale = Format::scale(held, of) * factor, minimum = 0;
            if constexpr (Format::MINIMA) minimum = Format::minimum(held, of);
            float2 two = T::unpack(Format::pair(words, i, j, operand));
            made[j] = T::pack(make_float2(two.x * scale - minimum, two.y * scale - minimum));
        }
        u16* to = numbers + output * inner + k;
        if constexpr (Format::GROUP == 16) {
            *reinterpret_cast<uint2*>(to) = make_uint2(made[0], made[1]);
            *reinterpret_cast<uint2*>(to + 16) = make_uint2(made[2], made[3]);
        } else {
            *reinterpret_cast<uint4*>(to) = make_uint4(made[0], made[1], made[2], made[3]);
        }
    }
}
