// KERNELS(NAME, FORMAT): the kernels of a format, which is the last argument because its name may have a comma.
#pragma once
#include "low_bit_matmul.cuh"
#include "low_bit_weights.cuh"
#include "variants.cuh"

constexpr int THREADS = 256;
constexpr int TILES = 2;  // of 16 outputs, per warp

#define MATMUL(NAME, ROWS, BLOCKS, ...)                                                                           \
    extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)                                                 \
        NAME(const u16* x, const u8* weight, const __VA_ARGS__::Scale* scales, const __VA_ARGS__::More* more,     \
             int rows, int width, int inner, int shift, u16* out) {                                               \
        low_bit_matmul<__VA_ARGS__, ROWS, TILES>(x, weight, __VA_ARGS__{scales, more, shift}, rows, width, inner, \
                                                 out);                                                            \
    }

#define WEIGHTS(NAME, ...)                                                                                            \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                             \
        NAME(const u8* weight, const __VA_ARGS__::Scale* scales, const __VA_ARGS__::More* more, int width, int inner, \
             int shift, u16* numbers) {                                                                               \
        low_bit_weights<__VA_ARGS__>(weight, __VA_ARGS__{scales, more, shift}, width, inner, numbers);                \
    }

#define KERNELS(NAME, ...)                       \
    MATMUL(matmul_8_##NAME, 8, 2, __VA_ARGS__)   \
    MATMUL(matmul_16_##NAME, 16, 2, __VA_ARGS__) \
    MATMUL(matmul_32_##NAME, 32, 1, __VA_ARGS__) \
    MATMUL(matmul_64_##NAME, 64, 1, __VA_ARGS__) \
    WEIGHTS(weights_##NAME, __VA_ARGS__)
