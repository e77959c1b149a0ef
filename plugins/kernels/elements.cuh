// Element types of tensors, two neighbours at a time, and the tensor core matmul of the 16-bit types.
#pragma once

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using i64 = long long;
using u64 = unsigned long long;

#define INFINITE __int_as_float(0x7f800000)

constexpr float LOG2_E = 1.44269504088896341f;

// Two neighbouring elements as stored.
__device__ inline u32 two(const u16* at) { return *reinterpret_cast<const u32*>(at); }

struct Bf16 {
    using Element = u16;

    static __device__ u32 pack(float2 x) {
        u32 bits;
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(x.y), "f"(x.x));
        return bits;
    }
    static __device__ float2 unpack(u32 bits) {
        return make_float2(__uint_as_float(bits << 16), __uint_as_float(bits & 0xffff0000u));
    }
    static __device__ float load1(const u16* at) { return unpack(*at).x; }
    static __device__ float2 load2(const u16* at) { return unpack(two(at)); }
    static __device__ void store2(u16* at, float2 x) { *reinterpret_cast<u32*>(at) = pack(x); }
    static __device__ float2 rounded2(float2 x) { return unpack(pack(x)); }

    // c[16 x 8] += a[16 x 16] b[16 x 8], each in the fragments of mma.m16n8k16.
    static __device__ void mma(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
        asm volatile(
            "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    }
};

struct Fp16 {
    using Element = u16;

    static __device__ u32 pack(float2 x) {
        u32 bits;
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(x.y), "f"(x.x));
        return bits;
    }
    static __device__ float2 unpack(u32 bits) {
        float2 x;
        asm("cvt.f32.f16 %0, %1;" : "=f"(x.x) : "h"(static_cast<u16>(bits)));
        asm("cvt.f32.f16 %0, %1;" : "=f"(x.y) : "h"(static_cast<u16>(bits >> 16)));
        return x;
    }
    static __device__ float load1(const u16* at) { return unpack(*at).x; }
    static __device__ float2 load2(const u16* at) { return unpack(two(at)); }
    static __device__ void store2(u16* at, float2 x) { *reinterpret_cast<u32*>(at) = pack(x); }
    static __device__ float2 rounded2(float2 x) { return unpack(pack(x)); }

    static __device__ void mma(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
        asm volatile(
            "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    }
};

struct Fp32 {
    using Element = float;

    static __device__ float load1(const float* at) { return *at; }
    static __device__ float2 load2(const float* at) { return *reinterpret_cast<const float2*>(at); }
    static __device__ void store2(float* at, float2 x) { *reinterpret_cast<float2*>(at) = x; }
    static __device__ float2 rounded2(float2 x) { return x; }
};
