// What lies between the two matmuls of experts (plugins/reference/experts.py): biases, and the activation of gate and
// up.
#pragma once
#include "experts_elements.cuh"

template <class T>
struct Activation {
    const typename T::Element* bias;  // of the rows of all experts' gates and ups; null: none
    int interleaved;                  // gates and ups by turns, else the gates of an expert first
    float alpha, cubic, limit, offset;

    // The row of gate `i` of `width` among those of `expert`, and how many rows later its up is.
    __device__ __forceinline__ int gate_row(int expert, int i, int width) const {
        return expert * 2 * width + (interleaved ? 2 * i : i);
    }
    __device__ __forceinline__ int step(int width) const { return interleaved ? 1 : width; }

    // The biases of gate row `row` and of its up.
    __device__ __forceinline__ float2 biases(int row, int width) const {
        return make_float2(load1_if<T>(bias, row), load1_if<T>(bias, row + step(width)));
    }

    // Of the products of a gate and its up, without their biases.
    __device__ __forceinline__ float operator()(float gate, float up, float2 biases) const {
        gate += biases.x;
        up += biases.y;
        if (limit > 0) {  // comparisons that keep NaN
            gate = gate > limit ? limit : gate;
            up = up > limit ? limit : up < -limit ? -limit : up;
        }
        return __fdividef(gate, 1.0f + __expf(-gate * (alpha + cubic * gate * gate))) * (up + offset);
    }
};

// The expert of a place among pairs sorted by expert, whose pairs end at `ends`.
__device__ __forceinline__ int expert_of(int place, const int* ends, int experts) {
    int low = 0, high = experts - 1;
    while (low < high) {
        int middle = (low + high) / 2;
        if (place < ends[middle]) high = middle;
        else low = middle + 1;
    }
    return low;
}
