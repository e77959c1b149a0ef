// The matmuls of experts in 16 bits. A warp adds the inputs of its outputs in order, 16 at a time, as torch's grouped
// matmuls do: where these give equal bits, a row has them among any number of rows.
#pragma once
#include "experts_kept.cuh"

// How a unit is multiplied: inputs in order.
template <class T>
struct InOrder {
    static constexpr int TILES = ITEM_ROWS / 8;  // of rows, at most
    static constexpr int CHUNK = LINE / 2;       // inputs of a line

    static __device__ __forceinline__ int row_bytes(int inner) { return 2 * inner; }
    static __device__ __forceinline__ void prefetch(int) {}
    // Vectors from one kept row to the next, so that eight rows which are read at once use different banks.
    static __device__ __forceinline__ int kept_pitch(int inner) {
        return (inner + CHUNK - 1) / CHUNK * (CHUNK / 8) + 1;
    }
    // The row of a tile whose address a lane gives load_matrices, and which of its first vectors.
    static __device__ __forceinline__ int row() { return threadIdx.x % 8; }
    static __device__ __forceinline__ int vector() { return threadIdx.x % 32 / 8; }

    // ``sums`` of COUNT tiles of rows over all inputs.
    template <int COUNT, class Weights, class OutputOf>
    __device__ __forceinline__ void multiply(Weights& weights, OutputOf, int, const uint4* const (&rows)[TILES],
                                             float (&sums)[TILES][4]) const {
        int lane = threadIdx.x % 32, lines = weights.lines();
        for (int line = 0; line < lines; ++line) {
            const uint4* found = weights.oldest();
            u32 outputs[CHUNK / 16][4], x[COUNT][CHUNK / 32][4];
#pragma unroll
            for (int k = 0; k < CHUNK / 16; ++k)
                load_matrices(outputs[k], shared_address(found + weights.place(lane % 16, 2 * k + lane / 16)));
#pragma unroll
            for (int tile = 0; tile < COUNT; ++tile)
#pragma unroll
                for (int k = 0; k < CHUNK / 32; ++k)
                    load_matrices(x[tile][k], shared_address(rows[tile] + line * (CHUNK / 8) + k * 4));
            weights.order();
#pragma unroll
            for (int k = 0; k < CHUNK / 16; ++k)
#pragma unroll
                for (int tile = 0; tile < COUNT; ++tile)
                    T::mma(sums[tile], outputs[k], x[tile][k / 2][k % 2 * 2], x[tile][k / 2][k % 2 * 2 + 1]);
        }
    }
};

template <class T>
__device__ __forceinline__ float rounded(float x) {
    return T::rounded2(make_float2(x, 0)).x;
}

template <class T>
__device__ void gate_up_ordered(const u16* x, const u16* weight, Items items, int hidden, int width, const int* order,
                                int per_token, Activation<T> activation, u16* activated) {
    auto value_of = [=](int own, float gate, float up) {
        return activation(rounded<T>(gate), rounded<T>(up), activation.biases(own, width));
    };
    multiply_gate_up(InOrder<T>{}, x, reinterpret_cast<const u8*>(weight), items, order, hidden, width, per_token,
                     activation, activated, value_of);
}

// outputs[place of the pair].
template <class T>
__device__ void down_ordered(const u16* activated, const u16* weight, Items items, int hidden, int width,
                             u16* outputs) {
    auto store = [=](int, int place, int at, float first, float other) {
        u16* to = outputs + static_cast<i64>(place) * hidden + at;
        store1<T>(to, first);
        store1<T>(to + 8, other);
    };
    multiply_down(InOrder<T>{}, activated, reinterpret_cast<const u8*>(weight), items, hidden, width, store);
}
