// float8_e4m3fn: eight values at a time, and quantization of rows with a scale each.
#pragma once
#include "elements.cuh"
#include "float8_reduce.cuh"

#define LARGEST_FLOAT8 448.0f
#define MIN_SCALE 0x1p-100f  // replaces the scale of a row of zeros

struct Eight { float at[8]; };

// Two values, the first in the lower byte; values that are too large become the largest. Needs compute capability 8.9.
__device__ __forceinline__ u32 float8_pair(float low, float high) {
#if __CUDA_ARCH__ >= 890
    u16 bits;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(bits) : "f"(high), "f"(low));
    return bits;
#else
    return 0;
#endif
}

// Eight values as stored.
template <class T>
struct alignas(16) Packed {
    uint4 bits[sizeof(typename T::Element) / 2];
};

template <class T>
__device__ __forceinline__ Eight unpack8(const Packed<T>& packed) {
    uint4 bits = packed.bits[0];
    if constexpr (sizeof(typename T::Element) == 2) {
        float2 a = T::unpack(bits.x), b = T::unpack(bits.y), c = T::unpack(bits.z), d = T::unpack(bits.w);
        return {{a.x, a.y, b.x, b.y, c.x, c.y, d.x, d.y}};
    } else {
        uint4 more = packed.bits[1];
        return {{__uint_as_float(bits.x), __uint_as_float(bits.y), __uint_as_float(bits.z), __uint_as_float(bits.w),
                 __uint_as_float(more.x), __uint_as_float(more.y), __uint_as_float(more.z), __uint_as_float(more.w)}};
    }
}

template <class T>
__device__ __forceinline__ Packed<T> pack8(const Eight& x) {
    if constexpr (sizeof(typename T::Element) == 2) {
        return {{make_uint4(T::pack(make_float2(x.at[0], x.at[1])), T::pack(make_float2(x.at[2], x.at[3])),
                            T::pack(make_float2(x.at[4], x.at[5])), T::pack(make_float2(x.at[6], x.at[7])))}};
    } else {
        auto bits = [&](int i) { return __float_as_uint(x.at[i]); };
        return {{make_uint4(bits(0), bits(1), bits(2), bits(3)), make_uint4(bits(4), bits(5), bits(6), bits(7))}};
    }
}

template <class T>
__device__ __forceinline__ Packed<T> packed8(const typename T::Element* at) {
    return *reinterpret_cast<const Packed<T>*>(at);
}

template <class T>
__device__ __forceinline__ Eight load8(const typename T::Element* at) {
    return unpack8<T>(packed8<T>(at));
}

template <class T>
__device__ __forceinline__ void store8(typename T::Element* to, const Eight& x) {
    *reinterpret_cast<Packed<T>*>(to) = pack8<T>(x);
}

// Round to T, as if the values had been stored and read again.
template <class T>
__device__ __forceinline__ void round_to(Eight& x) {
    if constexpr (sizeof(typename T::Element) == 2) x = unpack8<T>(pack8<T>(x));
}

template <class T>
__device__ __forceinline__ float rounded(float x) {
    if constexpr (sizeof(typename T::Element) == 2) return T::unpack(T::pack(make_float2(x, x))).x;
    else return x;
}

// Eight results of a matmul, each times the row's scale and its own.
template <class T>
__device__ __forceinline__ Eight scaled8(const Packed<T>& packed, float scale, const Eight& each) {
    Eight x = unpack8<T>(packed);
#pragma unroll
    for (int i = 0; i < 8; ++i) x.at[i] *= scale * each.at[i];
    return x;
}

__device__ __forceinline__ void enlarge(float& largest, const Eight& x) {
#pragma unroll
    for (int i = 0; i < 8; ++i) largest = fmaxf(largest, fabsf(x.at[i]));
}

// The divisor of a row: a given scale, or one computed from the row.
struct Divisor {
    float scale;
    bool given;
};

__device__ __forceinline__ Divisor divisor(float largest, const float* given) {
    return {given ? *given : fmaxf(largest / LARGEST_FLOAT8, MIN_SCALE), given != nullptr};
}

// A computed scale leaves no quotient above 448. The rounded reciprocal and one correction then give the correctly
// rounded quotient (Markstein, IBM J. Res. Dev. 34, 1990), in a third of the instructions. A given scale may overflow.
__device__ __forceinline__ void store_float8(u8* to, Eight x, const Divisor& by) {
    float reciprocal = __frcp_rn(by.scale);
    if (by.given) {
#pragma unroll
        for (int i = 0; i < 8; ++i) x.at[i] /= by.scale;
    } else {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            float quotient = x.at[i] * reciprocal;
            x.at[i] = fmaf(fmaf(-quotient, by.scale, x.at[i]), reciprocal, quotient);
        }
    }
    auto pair = [&](int i) { return float8_pair(x.at[i], x.at[i + 1]); };
    *reinterpret_cast<uint2*>(to) = make_uint2(pair(0) | pair(2) << 16, pair(4) | pair(6) << 16);
}

// Quantize a row with one scale, by all threads of a block. value(i) gives the eight values from i on: each thread
// calls it once for its first values and twice for further ones.
template <class Value>
__device__ __forceinline__ void quantize_row(int width, const float* given, u8* quantized, float* scale, Value value) {
    int stride = 8 * blockDim.x, first = 8 * threadIdx.x;
    Eight held;
    float largest = 0;
    if (first < width) enlarge(largest, held = value(first));
    for (int i = first + stride; i < width; i += stride) enlarge(largest, value(i));
    Divisor by = divisor(row_max(largest), given);
    if (first < width) store_float8(quantized + first, held, by);
    for (int i = first + stride; i < width; i += stride) store_float8(quantized + i, value(i), by);
    if (threadIdx.x == 0) *scale = by.scale;
}
