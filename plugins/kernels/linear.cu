// linear: a matmul whose rows have the same bits for any number of rows. Kernels for few rows, from compute capability
// 9.0 on; cuBLASLt has the others.
#include "linear.cuh"
#include "variants.cuh"

#if __CUDA_ARCH__ >= 900
#define FEW_ROWS(...) few_rows<__VA_ARGS__>(x, weight, rows, width, inner, pitch, out);
#define NARROW_ROWS(T) narrow_rows<T>(x, weight, rows, width, inner, pitch, out);
#else
#define FEW_ROWS(...)
#define NARROW_ROWS(T)
#endif
#define KERNEL(NAME, T, ROWS, STAGES, ROW_STAGES)                                               \
    extern "C" __global__ void __launch_bounds__(256) few_rows_##ROWS##_##STAGES##_##NAME(      \
        const u16* x, const u16* weight, int rows, int width, int inner, int pitch, u16* out) { \
        FEW_ROWS(T, ROWS / 8, STAGES, ROW_STAGES)                                               \
    }
#define NARROW(NAME, T)                                                                                            \
    extern "C" __global__ void __launch_bounds__(256)                                                              \
        narrow_rows_##NAME(const u16* x, const u16* weight, int rows, int width, int inner, int pitch, u16* out) { \
        NARROW_ROWS(T)                                                                                             \
    }
#define KERNELS(NAME, T)     \
    KERNEL(NAME, T, 8, 6, 2) \
    KERNEL(NAME, T, 8, 16, 4) KERNEL(NAME, T, 16, 6, 2) KERNEL(NAME, T, 16, 16, 4) NARROW(NAME, T)

IF_BF16(KERNELS(bf16, Bf16))
IF_FP16(KERNELS(fp16, Fp16))
