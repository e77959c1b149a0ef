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
__device__ __forceinline__ float rounded(float x) {
    if constexpr (sizeof(typename T::Element) == 2) return T::unpack(T::pack(make_float2(x, x))).x;
    else return x;
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

__device__ __forceinline__ void enlarge(float& largest, const Eight& x) {
#pragma unroll
    for (int i = 0; i < 8; ++i) largest = fmaxf(largest, fabsf(x.at[i]));
}

__device__ __forceinline__ float scale_of(float largest, const float* given) {
    return given ? *given : fmaxf(largest / LARGEST_FLOAT8, LEAST_SCALE);
}

__device__ __forceinline__ void store_float8(u8* to, const Eight& x, float by) {
    u32 low = float8_pair(x.at[0] / by, x.at[1] / by) | float8_pair(x.at[2] / by, x.at[3] / by) << 16;
    u32 high = float8_pair(x.at[4] / by, x.at[5] / by) | float8_pair(x.at[6] / by, x.at[7] / by) << 16;
    *reinterpret_cast<uint2*>(to) = make_uint2(low, high);
}

// Round a row to float8 with one scale, by all threads of a block. value(i) gives the eight values from i on: for each
// thread the first are asked for once, further ones twice.
template <class Value>
__device__ __forceinline__ void quantize_row(int width, const float* given, u8* quantized, float* scale, Value value) {
    int stride = 8 * blockDim.x, first = 8 * threadIdx.x;
    Eight held;
    float largest = 0;
    if (first < width) enlarge(largest, held = value(first));
    for (int i = first + stride; i < width; i += stride) enlarge(largest, value(i));
    float by = scale_of(row_max(largest), given);
    if (first < width) store_float8(quantized + first, held, by);
    for (int i = first + stride; i < width; i += stride) store_float8(quantized + i, value(i), by);
    if (threadIdx.x == 0) *scale = by;
}
