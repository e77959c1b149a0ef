// Matmuls with 4-bit weights: a kernel that reads the weight once for few rows, and dequantization for more rows.
#include "int4_matmul.cuh"
#include "int4_weights.cuh"
#include "variants.cuh"

constexpr int THREADS = 256;
constexpr int TILES = 2;  // of 16 outputs, per warp

#define MATMUL(NAME, T, ROWS, BLOCKS, ZEROS)                                                                          \
    extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) NAME(                                               \
        const u16* x, const u8* weight, const u16* scales, const u8* zeros, int rows, int width, int inner,           \
        int shift, u16* out) {                                                                                        \
        int4_matmul<T, ROWS, TILES, ZEROS>(x, weight, scales, zeros, rows, width, inner, shift, out);                 \
    }

#define MATMULS(NAME, T, ROWS, BLOCKS)                                                                                \
    MATMUL(int4_matmul_##ROWS##_##NAME, T, ROWS, BLOCKS, false)                                                       \
    MATMUL(int4_matmul_##ROWS##_zeros_##NAME, T, ROWS, BLOCKS, true)

#define KERNELS(NAME, T)                                                                                              \
    MATMULS(NAME, T, 8, 2) MATMULS(NAME, T, 16, 2) MATMULS(NAME, T, 32, 1) MATMULS(NAME, T, 64, 1)                    \
    extern "C" __global__ void __launch_bounds__(THREADS) int4_weights_##NAME(                                        \
        const u8* weight, const u16* scales, const u8* zeros, int width, int inner, int shift, u16* numbers) {        \
        int4_weights<T>(weight, scales, zeros, width, inner, shift, numbers);                                         \
    }

IF_BF16(KERNELS(bf16, Bf16))
IF_FP16(KERNELS(fp16, Fp16))
