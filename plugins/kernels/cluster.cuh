// Blocks that read each other's shared memory: a cluster, available from compute capability 9.0.
#pragma once

#include "intrinsics.cuh"

#if __CUDA_ARCH__ >= 900

__device__ inline int cluster_size() {
    int size;
    asm("mov.u32 %0, %%cluster_nctaid.x;" : "=r"(size));
    return size;
}

__device__ inline int cluster_rank() {
    int rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

__device__ inline void arrive_at_cluster() { asm volatile("barrier.cluster.arrive;" ::: "memory"); }
__device__ inline void wait_for_cluster() { asm volatile("barrier.cluster.wait;" ::: "memory"); }

// The address in block `rank` that corresponds to `address` here.
__device__ inline u32 address_in(u32 address, int rank) {
    u32 there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
    return there;
}

__device__ inline float2 load_remote2(u32 at) {
    float2 x;
    asm volatile("ld.shared::cluster.v2.f32 {%0,%1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(at) : "memory");
    return x;
}

__device__ inline float4 load_remote4(u32 at) {
    float4 x;
    asm volatile("ld.shared::cluster.v4.f32 {%0,%1,%2,%3}, [%4];"
                 : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
                 : "r"(at)
                 : "memory");
    return x;
}

#else

__device__ inline int cluster_size() { return 1; }
__device__ inline int cluster_rank() { return 0; }

#endif
