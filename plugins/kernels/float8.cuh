// float8_e4m3fn: eight values at a time, and rows that are rounded to it with a scale each.
#pragma once
#include "elements.cuh"
#include "float8_reduce.cuh"

#define LARGEST_FLOAT8 448.0f
#define LEAST_SCALE 0x1p-100f  // in place of the scale of a row of zeros

struct Eight {
    float at[8];
};

// Two values, the first in the lower byte; what is too large becomes the largest. GPUs of compute capability 8.9 have it.
__device__ __forceinline__ u32 float8_pair(float low, float high) {
#if __CUDA_ARCH__ >= 890
    u16 bits;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(bits) : "f"(high), "f"(low));
    return bits;
#else
    return 0;
#endif
}

template <class T>
__device__ __forceinline__ Eight load8(const typename T::Element* at) {
    Eight x;
    if constexpr (sizeof(typename T::Element) == 2) {
        uint4 bits = *reinterpret_cast<const uint4*>(at);
        float2 a = T::unpack(bits.x), b = T::unpack(bits.y), c = T::unpack(bits.z), d = T::unpack(bits.w);
        x = {{a.x, a.y, b.x, b.y, c.x, c.y, d.x, d.y}};
    } else {
        float4 a = *reinterpret_cast<const float4*>(at), b = *reinterpret_cast<const float4*>(at + 4);
        x = {{a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w}};
    }
    return x;
}

// Round to T, as if the values had been stored and read again.
template <class T>
__device__ __forceinline__ void round_to(Eight& x) {
    if constexpr (sizeof(typename T::Element) == 2) {
#pragma unroll
        for (int i = 0; i < 8; i += 2) {
            float2 pair = T::unpack(T::pack(make_float2(x.at[i], x.at[i + 1])));
            x.at[i] = pair.x;
            x.at[i + 1] = pair.y;
        }
    }
}

template <class T>
__device__ __forceinline__ void store8(typename T::Element* to, const Eight& x) {
    if constexpr (sizeof(typename T::Element) == 2) {
        *reinterpret_cast<uint4*>(to) = make_uint4(
            T::pack(make_float2(x.at[0], x.at[1])), T::pack(make_float2(x.at[2], x.at[3])),
            T::pack(make_float2(x.at[4], x.at[5])), T::pack(make_float2(x.at[6], x.at[7])));
    } else {
        *reinterpret_cast<float4*>(to) = make_float4(x.at[0], x.at[1], x.at[2], x.at[3]);
        *reinterpret_cast<float4*>(to + 4) = make_float4(x.at[4], x.at[5], x.at[6], x.at[7]);
    }
}

// Eight results of a product, each times the row's scale and its own.
template <class T>
__device__ __forceinline__ Eight scaled8(const typename T::Element* product, float scale, const float* each) {
    Eight x = load8<T>(product), by = load8<Fp32>(each);
#pragma unroll
    for (int i = 0; i < 8; ++i) x.at[i] *= scale * by.at[i];
    return x;
}

// Round a row to float8 with one scale, by all threads of the blocks that share it. value(i, sweep) gives the eight
// values from i on: for each thread those of its first SWEEPS are asked for once, further ones twice.
template <int SWEEPS, bool SHARED, class Value>
__device__ __forceinline__ void quantize_row(int width, const float* given, u8* quantized, float* scale, Value value) {
    int rank = SHARED ? block_rank() : 0, blocks = SHARED ? blocks_of_row() : 1;
    int stride = 8 * blockDim.x * blocks, first = 8 * (rank * blockDim.x + threadIdx.x);
    Eight held[SWEEPS];
    float largest = 0;
    auto enlarge = [&](const Eight& x) {
#pragma unroll
        for (int i = 0; i < 8; ++i) largest = fmaxf(largest, fabsf(x.at[i]));
    };
    if (SHARED) blocks_begin();
#pragma unroll
    for (int sweep = 0; sweep < SWEEPS; ++sweep)
        if (first + sweep * stride < width) enlarge(held[sweep] = value(first + sweep * stride, sweep));
    for (int i = first + SWEEPS * stride; i < width; i += stride) enlarge(value(i, SWEEPS));
    largest = SHARED ? blocks_max(largest, blocks) : row_max(largest);
    float by = given ? *given : fmaxf(largest / LARGEST_FLOAT8, LEAST_SCALE);
    auto store = [&](int i, const Eight& x) {
        u32 low = float8_pair(x.at[0] / by, x.at[1] / by) | float8_pair(x.at[2] / by, x.at[3] / by) << 16;
        u32 high = float8_pair(x.at[4] / by, x.at[5] / by) | float8_pair(x.at[6] / by, x.at[7] / by) << 16;
        *reinterpret_cast<uint2*>(quantized + i) = make_uint2(low, high);
    };
#pragma unroll
    for (int sweep = 0; sweep < SWEEPS; ++sweep)
        if (first + sweep * stride < width) store(first + sweep * stride, held[sweep]);
    for (int i = first + SWEEPS * stride; i < width; i += stride) store(i, value(i, SWEEPS));
    if (first == 0) *scale = by;
}
