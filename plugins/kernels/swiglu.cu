// swiglu: activated[r, i] = silu(gate_up[r, i]) * gate_up[r, width + i], in float32, rounded to the input's dtype once.
//
// A thread handles eight elements: a 16-byte load of each half and one 16-byte store. Memory bounds it, so nothing is
// staged. The blocks of a row are neighbours, grid (ceil(width / 8 / threads) * rows).

#include "early.cuh"
#include "swiglu.cuh"
#include "variants.cuh"

struct BFloat16 {
    static __device__ __forceinline__ float wide(u16 bits) { return __uint_as_float((u32)bits << 16); }
    static __device__ __forceinline__ u16 narrow(float value) {
        u16 bits;
        asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
        return bits;
    }
};

struct Float16 {
    static __device__ __forceinline__ float wide(u16 bits) {
        float value;
        asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
        return value;
    }
    static __device__ __forceinline__ u16 narrow(float value) {
        u16 bits;
        asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
        return bits;
    }
};

struct Place {
    long long row;
    int first;  // element of the row
};

__device__ __forceinline__ Place place_of(int width) {
    int elements = blockDim.x * 8, across = (width + elements - 1) / elements;
    return {blockIdx.x / across, static_cast<int>(blockIdx.x % across * elements + threadIdx.x * 8)};
}

template <class Type>
__device__ __forceinline__ u32 activate_pair(u32 gate, u32 up) {
    u32 low = Type::narrow(gated(Type::wide((u16)gate), Type::wide((u16)up)));
    u32 high = Type::narrow(gated(Type::wide((u16)(gate >> 16)), Type::wide((u16)(up >> 16))));
    return low | high << 16;
}

template <class Type>
__device__ __forceinline__ void swiglu(const u16* gate_up, int width, u16* activated) {
    auto [row, first] = place_of(width);
    const u16* gate = gate_up + row * 2 * width;
    const u16* up = gate + width;
    u16* out = activated + row * width;
    if (first >= width) return;
    if (width % 8 == 0) {
        uint4 g = *reinterpret_cast<const uint4*>(gate + first);
        uint4 u = *reinterpret_cast<const uint4*>(up + first);
        uint4 a;
        a.x = activate_pair<Type>(g.x, u.x);
        a.y = activate_pair<Type>(g.y, u.y);
        a.z = activate_pair<Type>(g.z, u.z);
        a.w = activate_pair<Type>(g.w, u.w);
        *reinterpret_cast<uint4*>(out + first) = a;
        return;
    }
    for (int i = first; i < min(first + 8, width); ++i) {
        out[i] = Type::narrow(gated(Type::wide(gate[i]), Type::wide(up[i])));
    }
}

__device__ __forceinline__ void swiglu(const float* gate_up, int width, float* activated) {
    auto [row, first] = place_of(width);
    for (int i = first; i < min(first + 8, width); ++i) {
        float gate = gate_up[row * 2 * width + i], up = gate_up[(row * 2 + 1) * width + i];
        activated[row * width + i] = gate / (1.0f + __expf(-gate)) * up;
    }
}

#define KERNEL(NAME, T, SWIGLU)                                                                                  \
    extern "C" __global__ void __launch_bounds__(256) swiglu_##NAME(const T* gate_up, int width, T* activated) { \
        begin_next();                                                                                            \
        wait_for_previous();                                                                                     \
        SWIGLU(gate_up, width, activated);                                                                       \
    }

IF_BF16(KERNEL(bf16, u16, swiglu<BFloat16>))
IF_FP16(KERNEL(fp16, u16, swiglu<Float16>))
IF_FP32(KERNEL(fp32, float, swiglu))
