// Products of float32 matrices by tensor cores, whose operands keep 10 bits of their fractions (TF32).
#pragma once

#include "elements.cuh"

// `x` as an operand, rounded to the nearest: tensor cores ignore the last 13 bits. The instruction for it is slower.
__device__ inline u32 to_tf32(float x) { return __float_as_uint(x) + 0x1000; }

__device__ inline uint4 to_tf32(float4 x) { return make_uint4(to_tf32(x.x), to_tf32(x.y), to_tf32(x.z), to_tf32(x.w)); }

// c[16 x 8] += a[16 x 8] b[8 x 8], each in the fragments of mma.m16n8k8.
__device__ inline void multiply_add(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// The same with 16 inner indices: lane 4 g + t has inner indices 4 t to 4 t + 3 of rows g and g + 8 of a, and of column
// g of b. A sum does not ask in which order its terms are numbered, so these are four neighbours in memory.
__device__ inline void multiply_add(float (&c)[4], uint4 upper, uint4 lower, uint4 b) {
    multiply_add(c, upper.x, lower.x, upper.y, lower.y, b.x, b.y);
    multiply_add(c, upper.z, lower.z, upper.w, lower.w, b.z, b.w);
}
