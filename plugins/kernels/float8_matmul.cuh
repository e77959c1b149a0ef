// The matmul of a few rows in float8 with a float8 weight and its scales; reading the weight once bounds it.
#pragma once
#include "copy.cuh"
#include "early.cuh"
#include "float8.cuh"

constexpr int MATMUL_WARPS = 8, MATMUL_THREADS = 32 * MATMUL_WARPS;
constexpr int MATMUL_CHUNK = 64;  // inputs that a warp takes at a time
constexpr int TALL = 2;           // times 16 outputs per block

// c[16 outputs x 8 rows] += a[16 x 32] b[32 x 8], each in the fragments of mma.m16n8k32.
__device__ __forceinline__ void float8_mma(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
#if __CUDA_ARCH__ >= 890
    asm volatile(
        "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
#endif
}

// A block has 16 * TALL outputs; its warps share the inputs. A thread takes 16 bytes of a row at a time, which are
// other inputs than the fragments specify: the order of a sum's terms does not matter, and weight and rows are permuted
// alike. A thread copies its part of the weight into shared memory itself, so it does not wait for others. The first
// copies are in flight before the previous kernel, which writes the rows, has ended. At most 8 * TILES rows; a row's
// result depends on no other row, and not on TILES.
template <class T, int TILES>
__device__ void few_rows(const u8* quantized, const float* scales, const u8* weight, const float* weight_scales,
                         int rows, int width, int inner, typename T::Element* out) {
    constexpr int STRIDE = MATMUL_WARPS * MATMUL_CHUNK, ROWS = 8 * TILES, OUTPUTS = 16 * TALL, AT_ONCE = 4;
    // Chunks of the weight that a warp has requested, including the one it reads. Rows use the same memory as a cache.
    constexpr int STAGES = TILES == 1 ? 5 : 4;
    extern __shared__ uint4 ring[];  // [STAGES][2 * TALL][MATMUL_THREADS]
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, line = lane / 4, steps = (inner + STRIDE - 1) / STRIDE;
    int begin = warp * MATMUL_CHUNK + 16 * (lane % 4), first_output = OUTPUTS * blockIdx.x;
    const u8* row = quantized + static_cast<i64>(line) * inner;
    auto slot = [&](int step) { return ring + step % STAGES * (2 * TALL * MATMUL_THREADS) + threadIdx.x; };
    auto copy = [&](int step) {
        int k = begin + step * STRIDE;
#pragma unroll
        for (int i = 0; i < 2 * TALL; ++i) {
            int output = first_output + 8 * i + line;
            bool there = k < inner && output < width;
            const u8* from = weight + output * static_cast<i64>(inner) + k;
            copy16(shared_address(slot(step) + i * MATMUL_THREADS), from, there);
        }
    };
#pragma unroll
    for (int step = 0; step < STAGES - 1; ++step) {
        if (step < steps) copy(step);
        close_copies();
    }
    begin_next();
    wait_for_previous();

    float sums[TALL][TILES][4] = {};
    for (int first = 0; first < steps; first += AT_ONCE) {
        uint4 x[AT_ONCE][TILES];
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i)
#pragma unroll
            for (int t = 0; t < TILES; ++t) {
                int k = begin + (first + i) * STRIDE;
                const u8* from = row + 8 * t * static_cast<i64>(inner) + k;
                bool there = 8 * t + line < rows && k < inner;
                x[i][t] = there ? *reinterpret_cast<const uint4*>(from) : make_uint4(0, 0, 0, 0);
            }
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            int step = first + i;
            if (step >= steps) break;
            wait_copies<STAGES - 2>();
#pragma unroll
            for (int tall = 0; tall < TALL; ++tall) {
                const uint4* at = slot(step) + 2 * tall * MATMUL_THREADS;
                uint4 a = at[0], b = at[MATMUL_THREADS];
#pragma unroll
                for (int t = 0; t < TILES; ++t) {
                    float8_mma(sums[tall][t], a.x, b.x, a.y, b.y, x[i][t].x, x[i][t].y);
                    float8_mma(sums[tall][t], a.z, b.z, a.w, b.w, x[i][t].z, x[i][t].w);
                }
            }
            if (step + STAGES - 1 < steps) copy(step + STAGES - 1);
            close_copies();
        }
    }

    __shared__ float shared[MATMUL_WARPS][ROWS][OUTPUTS + 1];
#pragma unroll
    for (int tall = 0; tall < TALL; ++tall)
#pragma unroll
        for (int t = 0; t < TILES; ++t)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                shared[warp][8 * t + 2 * (lane % 4) + i % 2][16 * tall + line + 8 * (i / 2)] = sums[tall][t][i];
    __syncthreads();
    int to = threadIdx.x / (OUTPUTS / 2), column = threadIdx.x % (OUTPUTS / 2) * 2, output = first_output + column;
    if (to >= rows || to >= ROWS || output >= width) return;
    float2 sum = make_float2(0, 0);
#pragma unroll
    for (int w = 0; w < MATMUL_WARPS; ++w) {
        sum.x += shared[w][to][column];
        sum.y += shared[w][to][column + 1];
    }
    if (scales) {
        sum.x *= scales[to] * weight_scales[output];
        sum.y *= scales[to] * weight_scales[output + 1];
    }
    T::store2(out + static_cast<i64>(to) * width + output, sum);
}
