// Reductions over a block, in a fixed order. Every thread of the block calls them and gets the result.
#pragma once
#include "intrinsics.cuh"

// A token and its key. With equal keys the smaller id wins, as in argmax.
struct Best {
    double key;
    int token;  // -1: none

    __device__ __forceinline__ bool beats(const Best& other) const {
        if (token < 0 || other.token < 0) return token >= 0;
        return key > other.key || (key == other.key && token < other.token);
    }
};

template <class T>
__device__ __forceinline__ T from_lane(T value, int offset) {
    return __shfl_xor_sync(ALL_LANES, value, offset);
}

__device__ __forceinline__ Best from_lane(Best value, int offset) {
    return {__shfl_xor_sync(ALL_LANES, value.key, offset), __shfl_xor_sync(ALL_LANES, value.token, offset)};
}

template <class T, class Join>
__device__ __forceinline__ T block_reduce(T value, T neutral, Join join) {
    __shared__ T slots[33];
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
    for (int offset = 16; offset; offset >>= 1) value = join(value, from_lane(value, offset));
    __syncthreads();  // an earlier call may still be read
    if (lane == 0) slots[warp] = value;
    __syncthreads();
    if (warp == 0) {
        value = lane < warps ? slots[lane] : neutral;
        for (int offset = 16; offset; offset >>= 1) value = join(value, from_lane(value, offset));
        if (lane == 0) slots[32] = value;
    }
    __syncthreads();
    return slots[32];
}

__device__ __forceinline__ Best better(Best a, Best b) { return b.beats(a) ? b : a; }

__device__ __forceinline__ Best block_best(Best best) {
    return block_reduce(best, Best{-1.0, -1}, [](Best a, Best b) { return better(a, b); });
}

__device__ __forceinline__ float block_max(float value) {
    return block_reduce(value, -INFINITE, [](float a, float b) { return fmaxf(a, b); });
}

template <class T>
__device__ __forceinline__ T block_sum(T value) {
    return block_reduce(value, T(0), [](T a, T b) { return a + b; });
}
