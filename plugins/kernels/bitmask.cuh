// token_bitmask: a copy of the logits with masked tokens at -infinity. One thread, eight tokens.
//
// A file that includes this one names the kernels that it needs: TOKEN_BITMASK(bf16, bf16).
#pragma once
#include "logits.cuh"

// Store a group, as far as there is room for `count` logits.
template <class T, class Lanes>
__device__ __forceinline__ void store(T* to, Packed<Lanes> group, int count) {
    if (count == 8 && (u64(to) & 15) == 0) {
        *reinterpret_cast<uint4*>(to) = make_uint4(group.pair[0], group.pair[1], group.pair[2], group.pair[3]);
        return;
    }
    for (int i = 0; i < count; i++, group.rotate()) to[i].bits = u16(group.pair[0]);
}

__device__ __forceinline__ void store(float* to, Wide group, int count) {
    if (count == 8 && (u64(to) & 15) == 0) {
        reinterpret_cast<float4*>(to)[0] = make_float4(group.x[0], group.x[1], group.x[2], group.x[3]);
        reinterpret_cast<float4*>(to)[1] = make_float4(group.x[4], group.x[5], group.x[6], group.x[7]);
        return;
    }
    for (int i = 0; i < count; i++, group.rotate()) to[i] = group.x[0];
}

// Grid (parts of a row, rows), one group per thread.
template <class T>
__device__ __forceinline__ void token_bitmask(const T* logits, const int* bitmask, int vocab, T* masked) {
    Row<T> row(logits, bitmask, blockIdx.y, vocab);
    int index = blockIdx.x * blockDim.x + threadIdx.x;
    if (index >= row.groups()) return;
    store(masked + i64(blockIdx.y) * vocab + 8 * index, row.group(index), min(8, vocab - 8 * index));
}

#define TOKEN_BITMASK(NAME, T)                                                            \
    extern "C" __global__ void __launch_bounds__(256)                                     \
        token_bitmask_##NAME(const T* logits, const int* bitmask, int vocab, T* masked) { \
        token_bitmask(logits, bitmask, vocab, masked);                                    \
    }
