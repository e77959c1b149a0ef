// Reductions over the threads that share a row, with one barrier each: every warp reads the values of all warps. A
// maximum is one of non-negative numbers.
#pragma once
#include "intrinsics.cuh"

constexpr int MOST_WARPS = 32, MOST_BLOCKS = 8;

// For non-negative numbers, whose bits have the same order.
__device__ __forceinline__ u32 warp_max(u32 bits) {
    u32 largest;
    asm volatile("redux.sync.max.u32 %0, %1, 0xffffffff;" : "=r"(largest) : "r"(bits));
    return largest;
}

__device__ __forceinline__ float row_max(float value) {
    __shared__ u32 of_warp[MOST_WARPS];
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    u32 largest = warp_max(__float_as_uint(value));
    if (lane == 0) of_warp[warp] = largest;
    __syncthreads();
    return __uint_as_float(warp_max(lane < blockDim.x / 32 ? of_warp[lane] : 0));
}

__device__ __forceinline__ void row_sum_and_max(float& sum, float& largest) {
    __shared__ float sums[MOST_WARPS];
    __shared__ u32 largests[MOST_WARPS];
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    for (int offset = 16; offset; offset >>= 1) sum += __shfl_xor_sync(ALL_LANES, sum, offset);
    u32 bits = warp_max(__float_as_uint(largest));
    if (lane == 0) {
        sums[warp] = sum;
        largests[warp] = bits;
    }
    __syncthreads();
    bool there = lane < blockDim.x / 32;
    sum = there ? sums[lane] : 0;
    for (int offset = 16; offset; offset >>= 1) sum += __shfl_xor_sync(ALL_LANES, sum, offset);
    largest = __uint_as_float(warp_max(there ? largests[lane] : 0));
}

// Rows that several blocks share: the blocks of a cluster, available from compute capability 9.0. Elsewhere a row has
// one block.
__device__ __forceinline__ int block_rank() {
#if __CUDA_ARCH__ >= 900
    u32 rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
#else
    return 0;
#endif
}

__device__ __forceinline__ int blocks_of_row() {
#if __CUDA_ARCH__ >= 900
    u32 blocks;
    asm("mov.u32 %0, %%cluster_nctaid.x;" : "=r"(blocks));
    return blocks;
#else
    return 1;
#endif
}

// Announce that this block has begun: from then on others may write into its shared memory.
__device__ __forceinline__ void blocks_begin() {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}

// The largest value of a row's blocks.
__device__ __forceinline__ float blocks_max(float value) {
#if __CUDA_ARCH__ >= 900
    __shared__ u32 of_warp[MOST_BLOCKS * MOST_WARPS / 2];  // of all blocks, at most 512 threads each
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32, blocks = blocks_of_row();
    u32 largest = warp_max(__float_as_uint(value));
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");  // all blocks have begun
    if (lane < blocks) {
        u32 mine = static_cast<u32>(__cvta_generic_to_shared(&of_warp[block_rank() * warps + warp])), theirs;
        asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(theirs) : "r"(mine), "r"(lane));
        asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(theirs), "r"(largest) : "memory");
    }
    __syncwarp();
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
    largest = 0;
    for (int i = lane; i < blocks * warps; i += 32) largest = max(largest, of_warp[i]);
    return __uint_as_float(warp_max(largest));
#else
    return row_max(value);
#endif
}
