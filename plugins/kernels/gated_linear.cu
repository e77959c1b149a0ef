// gated_linear: the matmul with an MLP's gates and ups and their product, for many rows on Hopper.
#include "gated_linear.cuh"
#include "variants.cuh"

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define IF_HOPPER(...) __VA_ARGS__
#else
#define IF_HOPPER(...)
#endif
#define KERNEL(NAME, T)                                                                                           \
    extern "C" __global__ void __launch_bounds__(384, 1)                                                          \
        gated_linear_##NAME(const void* x, const void* weight, const void* out, int rows, int width, int inner) { \
        IF_HOPPER(gated_linear<T>(x, weight, out, rows, width, inner);)                                           \
    }

IF_BF16(KERNEL(bf16, Bf16))
IF_FP16(KERNEL(fp16, Fp16))
