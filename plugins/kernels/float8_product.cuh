// The product of a few rows in float8 with a weight in float8: bound by reading the weight, once.
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
// inputs than the fragments say: sums know no order, and weight and rows are taken alike.
template <class T, int ROWS>
__device__ void few_rows(
    const u8* quantized, const u8* weight, const float* scales, const float* weight_scales, int rows, int width,
    int inner, typename T::Element* product
) {
    constexpr int TILES = ROWS / 8, UNROLL = TILES == 1 ? 4 : 2;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, line = lane / 4, part = 16 * (lane % 4);
    i64 output = 16 * static_cast<i64>(blockIdx.x);
    const u8* upper = weight + (output + line) * inner + part;
    const u8* lower = upper + 8 * static_cast<i64>(inner);
    float sums[TILES][4] = {};

    auto rows_at = [&](int k, uint4 (&x)[TILES]) {
#pragma unroll
        for (int t = 0; t < TILES; ++t) {
            int row = 8 * t + line;
            const u8* from = quantized + static_cast<i64>(row) * inner + part + k;
            x[t] = row < rows ? __ldg(reinterpret_cast<const uint4*>(from)) : make_uint4(0, 0, 0, 0);
        }
    };
    auto multiply = [&](uint4 a, uint4 b, const uint4 (&x)[TILES]) {
#pragma unroll
        for (int t = 0; t < TILES; ++t) {
            float8_mma(sums[t], a.x, b.x, a.y, b.y, x[t].x, x[t].y);
            float8_mma(sums[t], a.z, b.z, a.w, b.w, x[t].z, x[t].w);
        }
    };

    constexpr int STRIDE = PRODUCT_WARPS * PRODUCT_CHUNK;
    int k = warp * PRODUCT_CHUNK;
    for (; k + (UNROLL - 1) * STRIDE + PRODUCT_CHUNK <= inner; k += UNROLL * STRIDE) {
        uint4 a[UNROLL], b[UNROLL], x[UNROLL][TILES];
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) {
            a[u] = load_once(upper + k + u * STRIDE);
            b[u] = load_once(lower + k + u * STRIDE);
        }
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) rows_at(k + u * STRIDE, x[u]);
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) multiply(a[u], b[u], x[u]);
    }
    for (; k < inner; k += STRIDE) {
        bool there = k + part < inner;
        uint4 none = make_uint4(0, 0, 0, 0), x[TILES];
        uint4 a = there ? load_once(upper + k) : none, b = there ? load_once(lower + k) : none;
        if (there) rows_at(k, x);
        else
            for (int t = 0; t < TILES; ++t) x[t] = none;
        multiply(a, b, x);
    }

    __shared__ float shared[PRODUCT_WARPS][ROWS][17];
#pragma unroll
    for (int t = 0; t < TILES; ++t)
#pragma unroll
        for (int i = 0; i < 4; ++i) shared[warp][8 * t + 2 * (lane % 4) + i % 2][line + 8 * (i / 2)] = sums[t][i];
    __syncthreads();
    for (int i = threadIdx.x; i < 8 * ROWS; i += blockDim.x) {
        int row = i / 8, column = i % 8 * 2;
        if (row >= rows) continue;
        float2 sum = make_float2(0, 0);
#pragma unroll
        for (int w = 0; w < PRODUCT_WARPS; ++w) {
            sum.x += shared[w][row][column];
            sum.y += shared[w][row][column + 1];
        }
        if (scales) {
            sum.x *= scales[row] * weight_scales[output + column];
            sum.y *= scales[row] * weight_scales[output + column + 1];
        }
        T::store2(product + static_cast<i64>(row) * width + output + column, sum);
    }
}
