// Loads and stores of single elements, as float32.
#pragma once
#include "elements.cuh"

template <class T>
__device__ __forceinline__ float load1(const typename T::Element* at) {
    if constexpr (sizeof(typename T::Element) == 2) return T::unpack(*at).x;
    else return *at;
}

// The number at `at`, 0 if there are none.
template <class T>
__device__ __forceinline__ float load1_if(const typename T::Element* from, i64 at) {
    return from ? load1<T>(from + at) : 0;
}

template <class T>
__device__ __forceinline__ void store1(typename T::Element* to, float x) {
    if constexpr (sizeof(typename T::Element) == 2) *to = static_cast<u16>(T::pack(make_float2(x, 0)));
    else *to = x;
}
