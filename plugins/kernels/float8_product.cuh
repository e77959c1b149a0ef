// The product of a few rows in float8 with a weight in float8, and its scales: bound by reading the weight, once.
#pragma once
#include "float8.cuh"

constexpr int PRODUCT_WARPS = 8;
constexpr int PRODUCT_CHUNK = 64;  // inputs that a warp takes at a time

__device__ __forceinline__ uint4 load_once(const u8* at) {
    uint4 x;
    asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "l"(at));
    return x;
}

// c[16 outputs x 8 rows] += a[16 x 32] b[32 x 8], each in the fragments of mma.m16n8k32.
__device__ __forceinline__ void float8_mma(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
#if __CUDA_ARCH__ >= 890
    asm volatile(
        "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
#endif
}

// A block has 16 outputs, its warps share the inputs. A thread takes 16 bytes of a row at a time, which are other
// inputs than the fragments say: sums know no order, and weight and rows are taken alike. At most 8 rows.
template <class T>
__device__ void few_rows(
    const u8* quantized, const float* scales, const u8* weight, const float* weight_scales, int rows, int width,
    int inner, typename T::Element* product
) {
    constexpr int UNROLL = 4, STRIDE = PRODUCT_WARPS * PRODUCT_CHUNK, ROWS = 8;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, line = lane / 4, part = 16 * (lane % 4);
    i64 output = 16 * static_cast<i64>(blockIdx.x);
    const u8* upper = weight + (output + line) * inner + part;
    const u8* lower = upper + 8 * static_cast<i64>(inner);
    const u8* row = quantized + static_cast<i64>(line) * inner + part;
    uint4 none = make_uint4(0, 0, 0, 0);
    float sums[4] = {};
    auto row_at = [&](int k) { return line < rows ? __ldg(reinterpret_cast<const uint4*>(row + k)) : none; };
    auto multiply = [&](uint4 a, uint4 b, uint4 x) {
        float8_mma(sums, a.x, b.x, a.y, b.y, x.x, x.y);
        float8_mma(sums, a.z, b.z, a.w, b.w, x.z, x.w);
    };
    int k = warp * PRODUCT_CHUNK;
    for (; k + (UNROLL - 1) * STRIDE + PRODUCT_CHUNK <= inner; k += UNROLL * STRIDE) {
        uint4 a[UNROLL], b[UNROLL], x[UNROLL];
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) {
            a[u] = load_once(upper + k + u * STRIDE);
            b[u] = load_once(lower + k + u * STRIDE);
        }
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) x[u] = row_at(k + u * STRIDE);
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) multiply(a[u], b[u], x[u]);
    }
    for (; k < inner; k += STRIDE) {
        bool there = k + part < inner;
        multiply(there ? load_once(upper + k) : none, there ? load_once(lower + k) : none, there ? row_at(k) : none);
    }

    __shared__ float shared[PRODUCT_WARPS][ROWS][17];
#pragma unroll
    for (int i = 0; i < 4; ++i) shared[warp][2 * (lane % 4) + i % 2][line + 8 * (i / 2)] = sums[i];
    __syncthreads();
    int to = threadIdx.x / 8, column = threadIdx.x % 8 * 2;
    if (to >= rows || to >= ROWS) return;
    float2 sum = make_float2(0, 0);
#pragma unroll
    for (int w = 0; w < PRODUCT_WARPS; ++w) {
        sum.x += shared[w][to][column];
        sum.y += shared[w][to][column + 1];
    }
    sum.x *= scales[to] * weight_scales[output + column];
    sum.y *= scales[to] * weight_scales[output + column + 1];
    T::store2(product + static_cast<i64>(to) * width + output + column, sum);
}
