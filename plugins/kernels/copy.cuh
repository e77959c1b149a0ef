// Memory movement of sm_80 and later: asynchronous copies into shared memory, matrix fragments out of it.
#pragma once

#include "elements.cuh"

__device__ inline u32 shared_address(const void* pointer) {
    return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

// Copy 16 bytes to shared memory; if `there` is false, write zeros and read nothing.
__device__ inline void copy16(u32 to, const void* from, bool there) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to),
                 "l"(__cvta_generic_to_global(from)), "r"(there ? 16 : 0)
                 : "memory");
}

// The same for memory that others read next to it soon: 256 bytes at a time go into the second-level cache.
__device__ inline void copy16_of_many(u32 to, const void* from, bool there) {
    asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16, %2;" ::"r"(to),
                 "l"(__cvta_generic_to_global(from)), "r"(there ? 16 : 0)
                 : "memory");
}

__device__ inline void copy4(u32 to, const void* from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}

// Copies belong to the group that the next close_copies() ends; wait_copies<n>() leaves at most n groups in flight.
__device__ inline void close_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int N>
__device__ inline void wait_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

// Four 8 x 8 matrices of 16-bit elements; lane l gives the address of row l % 8 of matrix l / 8.
__device__ inline void load_matrices(u32 (&to)[4], u32 from) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(from)
                 : "memory");
}

__device__ inline void load_transposed(u32 (&to)[4], u32 from) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(from)
                 : "memory");
}
