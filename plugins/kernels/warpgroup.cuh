// Multiplications by a warpgroup, and boxes of a tensor that the copy engine moves for them: Hopper alone (sm_90a).
#pragma once
#include "bulk_copy.cuh"

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

constexpr int GROUP = 128;  // threads of a warpgroup
constexpr int LINE = 128;   // bytes of a line of a box

// Copy a box of a tensor to shared memory, with the 16-byte parts of its lines permuted (128-byte swizzle).
__device__ __forceinline__ void copy_box(u32 to, const void* tensor, int column, int row, u32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], "
        "[%4];" ::"r"(to),
        "l"(tensor), "r"(column), "r"(row), "r"(barrier)
        : "memory");
}

__device__ __forceinline__ void prefetch_boxes(const void* tensor) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(tensor) : "memory");
}

// Lines of LINE bytes, permuted as above, eight of them per 1,024 bytes.
__device__ __forceinline__ u64 lines_at(u32 address) {
    return u64(1) << 62 | u64(8 * LINE / 16) << 32 | u64(1) << 16 | (address & 0x3ffff) / 16;
}

__device__ __forceinline__ void begin_multiplying() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void close_multiplying() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Wait until at most N groups of multiplications are in flight.
template <int N>
__device__ __forceinline__ void wait_multiplied() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}

#endif
