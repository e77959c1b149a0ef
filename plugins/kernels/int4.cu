// Products with weights in 4 bits: of some rows, the weight being read once, and the weight as numbers for more rows.
#include "int4_product.cuh"
#include "int4_weights.cuh"
#include "variants.cuh"

constexpr int THREADS = 256;
constexpr int TILES = 2;  // of 16 outputs: what a warp has

#define PRODUCT(NAME, T, ROWS, BLOCKS, ZEROS)                                                                         \
    extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) NAME(                                               \
        const u16* x, const u8* weight, const u16* scales, const u8* zeros, int rows, int width, int inner,           \
        int shift, u16* product) {                                                                                    \
        int4_product<T, ROWS, TILES, ZEROS>(x, weight, scales, zeros, rows, width, inner, shift, product);            \
    }

#define PRODUCTS(NAME, T, ROWS, BLOCKS)                                                                               \
    PRODUCT(int4_product_##ROWS##_##NAME, T, ROWS, BLOCKS, false)                                                     \
    PRODUCT(int4_product_##ROWS##_zeros_##NAME, T, ROWS, BLOCKS, true)

#define KERNELS(NAME, T)                                                                                              \
    PRODUCTS(NAME, T, 8, 2) PRODUCTS(NAME, T, 16, 2) PRODUCTS(NAME, T, 32, 1) PRODUCTS(NAME, T, 64, 1)                 \
    extern "C" __global__ void __launch_bounds__(THREADS) int4_weights_##NAME(                                        \
        const u8* weight, const u16* scales, const u8* zeros, int width, int inner, int shift, u16* numbers) {        \
        int4_weights<T>(weight, scales, zeros, width, inner, shift, numbers);                                         \
    }

IF_BF16(KERNELS(bf16, Bf16))
IF_FP16(KERNELS(fp16, Fp16))
