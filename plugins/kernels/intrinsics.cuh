// Instructions that CUDA C++ has no name for without headers. NVRTC gets no include path, so nothing is included.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#define ALL_LANES 0xffffffffu
#define INFINITE __int_as_float(0x7f800000)

// Approximations, to about 22 bits. Values that decide a draw are evaluated precisely; these only rule tokens out.
__device__ __forceinline__ float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float reciprocal_approx(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float log2_approx(float x) {
    float y;
    asm("lg2.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Maxima of two packed numbers; a number wins over a NaN.
__device__ __forceinline__ u32 max_bf16x2(u32 a, u32 b) {
    u32 y;
    asm("max.bf16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
    return y;
}

__device__ __forceinline__ u32 max_fp16x2(u32 a, u32 b) {
    u32 y;
    asm("max.f16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
    return y;
}

__device__ __forceinline__ float fp16_to_float(u32 low_half) {
    float y;
    asm("{ .reg .b16 h; cvt.u16.u32 h, %1; cvt.f32.f16 %0, h; }" : "=f"(y) : "r"(low_half));
    return y;
}

// The sign bits of bytes 0 and 1 (first = 0x9988), or 2 and 3 (0xbbaa), each spread over 16 bits.
__device__ __forceinline__ u32 spread_signs(u32 bytes, u32 selector) {
    u32 y;
    asm("prmt.b32 %0, %1, 0, %2;" : "=r"(y) : "r"(bytes), "r"(selector));
    return y;
}

__device__ __forceinline__ bool finite(float x) { return fabsf(x) < INFINITE; }

// Floats as unsigned integers of the same order, for maxima by integer instructions. NaN does not occur.
__device__ __forceinline__ u32 ordered(float x) {
    u32 bits = __float_as_uint(x);
    return bits ^ (u32(int(bits) >> 31) | 0x80000000u);
}

__device__ __forceinline__ float unordered(u32 key) {
    return __uint_as_float(key & 0x80000000u ? key ^ 0x80000000u : ~key);
}

// Increment, after all earlier writes and before all later reads of this thread. Returns the previous count. With
// __syncthreads() before and after, that holds for the block.
__device__ __forceinline__ u32 arrive(u32* counter) {
    u32 before;
    asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
    return before;
}

// Data that other blocks have written, read without this processor's own cache.
__device__ __forceinline__ u32 load_fresh(const u32* source) {
    u32 word;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(word) : "l"(source) : "memory");
    return word;
}

__device__ __forceinline__ uint4 load_fresh(const uint4* source) {
    uint4 x;
    asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "l"(source)
                 : "memory");
    return x;
}
