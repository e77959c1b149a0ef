// The sum over blocks that share the keys of a row tile, as a cluster (sm_90 and later): they read each other's shared
// memory, so nothing goes through global memory, and all of them sum.
#pragma once

#include "attention_merge.cuh"
#include "cluster.cuh"

constexpr int MAX_CLUSTER = 8;

#if __CUDA_ARCH__ >= 900

// Each block has `sums` [lines, D] and `bounds` [lines] in shared memory. Calls write(line, column, values) for four
// columns at a time, in one of the blocks.
template <int D, class Write>
__device__ void sum_cluster(const float* sums, const float2* bounds, int rank, int splits, int lines, Write write) {
    arrive_at_cluster();
    wait_for_cluster();
    u32 sums_at = shared_address(sums), bounds_at = shared_address(bounds);
    int units = lines * (D / 4), first = units * rank / splits, last = units * (rank + 1) / splits;
    for (int unit = first + threadIdx.x; unit < last; unit += 32 * WARPS) {
        float2 bound[MAX_CLUSTER];
        float4 sum[MAX_CLUSTER];
#pragma unroll
        for (int i = 0; i < MAX_CLUSTER; ++i) {
            bool there = i < splits;
            bound[i] = there ? load_remote2(address_in(bounds_at + unit / (D / 4) * 8, i)) : make_float2(-INFINITE, 0);
            sum[i] = there ? load_remote4(address_in(sums_at + unit * 16, i)) : make_float4(0, 0, 0, 0);
        }
        float largest = -INFINITE, weights = 0;
        float4 all = make_float4(0, 0, 0, 0);
#pragma unroll
        for (int i = 0; i < MAX_CLUSTER; ++i) largest = fmaxf(largest, bound[i].x);
#pragma unroll
        for (int i = 0; i < MAX_CLUSTER; ++i) {
            float keep = fraction(bound[i].x, largest);
            weights += keep * bound[i].y;
            all = plus(all, scaled(sum[i], keep));
        }
        write(unit / (D / 4), unit % (D / 4) * 4, scaled(all, 1 / weights));
    }
    arrive_at_cluster();  // no block exits while others read its memory
    wait_for_cluster();
}

#else

template <int D, class Write>
__device__ void sum_cluster(const float*, const float2*, int, int, int, Write) {}

#endif
