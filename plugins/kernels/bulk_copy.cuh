// Copies by the copy engine of sm_90 and later, and the barriers on which they complete.
#pragma once

#include "copy.cuh"

#if __CUDA_ARCH__ >= 900

// A barrier for copies of the copy engine: one thread announces their bytes, all threads wait for them.
__device__ __forceinline__ void create_barrier(u32 barrier) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void announce_bytes(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ __forceinline__ void wait_for_bytes(u32 barrier, u32 parity) {
    asm volatile(
        "{ .reg .pred done;\n"
        "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again; }" ::"r"(barrier),
        "r"(parity)
        : "memory");
}
__device__ __forceinline__ void copy_bytes(u32 to, const void* from, u32 bytes, u32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
                 "l"(__cvta_generic_to_global(from)), "r"(bytes), "r"(barrier)
                 : "memory");
}

#endif
