// The matmul of a few rows; reading the weight once bounds it. A warp has 16 outputs, and adds their inputs 16 at a
// time in order, as matmuls of many rows do that use no split-K: on GPUs where these give equal bits (linear.py tries
// it), a row's result does not depend on the number of rows.
#pragma once
#include "bulk_copy.cuh"
#include "early.cuh"

constexpr int WARP_OUTPUTS = 16;
constexpr int CHUNK = 64;                        // inputs of a warp's outputs that are copied together
constexpr int STAGE = 2 * CHUNK * WARP_OUTPUTS;  // bytes
constexpr int MANY_WARPS_STAGES = 6;             // chunks that a warp reads ahead where many share a processor
constexpr int ROW_CHUNK = 512;                   // inputs of the rows that are copied together
constexpr int ROW_PITCH = ROW_CHUNK + 8;         // so that eight rows begin in different banks

#if __CUDA_ARCH__ >= 900

// Fragments of one chunk: 16 outputs, and TILES times 8 rows.
template <int TILES>
struct Fragments {
    u32 outputs[CHUNK / 16][4], rows[TILES][CHUNK / 32][4];
};

// Blocks of any number of warps. Inputs are a multiple of CHUNK, rows at most 8 * TILES; `pitch`: from row to row of
// the results. The weight is read ahead, by STAGES chunks, before the previous kernel has written the rows; these by
// ROW_STAGES of their chunks.
template <class T, int TILES, int STAGES, int ROW_STAGES>
__device__ void few_rows(const u16* x, const u16* weight, int rows, int width, int inner, int pitch, u16* out) {
    // [warps][STAGES][STAGE], [ROW_STAGES][8 * TILES][ROW_PITCH]
    extern __shared__ __align__(128) unsigned char memory[];
    __shared__ u64 barriers[ROW_STAGES];
    int warps = blockDim.x / 32, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    int first = WARP_OUTPUTS * (blockIdx.x * warps + warp), steps = inner / CHUNK;
    u32 ring = shared_address(memory) + warp * STAGES * STAGE;
    u32 row_ring = shared_address(memory) + warps * STAGES * STAGE, barrier = shared_address(barriers);
    constexpr u32 ROW_BYTES = 2 * ROW_PITCH, ROW_STAGE = 8 * TILES * ROW_BYTES;

    const u16* from[4];
    bool there[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        int output = first + lane / 8 + 4 * i;
        there[i] = output < width;
        from[i] = weight + static_cast<i64>(there[i] ? output : 0) * inner + lane % 8 * 8;
    }
    u32 to = (lane / 8) * 128;
    int next = 0, next_slot = 0;
    auto copy_next = [&] {
        if (next < steps) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                u32 place = ring + next_slot * STAGE + to + i * 512 + ((lane % 8) ^ ((lane / 8 + 4 * i) % 8)) * 16;
                // Many warps share memory's pages, and read them faster in larger pieces; few warps do not.
                if constexpr (STAGES <= MANY_WARPS_STAGES) copy16_of_many(place, from[i] + next * CHUNK, there[i]);
                else copy16(place, from[i] + next * CHUNK, there[i]);
            }
        }
        close_copies();
        ++next;
        next_slot = next_slot + 1 == STAGES ? 0 : next_slot + 1;
    };
#pragma unroll 1
    for (int i = 0; i < STAGES - 1; ++i) copy_next();
    if (threadIdx.x < ROW_STAGES) create_barrier(barrier + 8 * threadIdx.x);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    begin_next();
    wait_for_previous();
    __syncthreads();

    int row_chunks = (inner + ROW_CHUNK - 1) / ROW_CHUNK;
    auto copy_rows = [&](int chunk) {
        if (warp || chunk >= row_chunks) return;
        u32 bytes = 2 * min(ROW_CHUNK, inner - chunk * ROW_CHUNK), done = barrier + chunk % ROW_STAGES * 8;
        if (lane == 0) announce_bytes(done, rows * bytes);
        __syncwarp();
        const u16* row = x + static_cast<i64>(lane) * inner + chunk * ROW_CHUNK;
        if (lane < rows) copy_bytes(row_ring + chunk % ROW_STAGES * ROW_STAGE + lane * ROW_BYTES, row, bytes, done);
    };
#pragma unroll 1
    for (int i = 0; i < ROW_STAGES; ++i) copy_rows(i);

    float sums[TILES][4] = {};
    int slot = 0;
    for (int chunk = 0; chunk < row_chunks; ++chunk) {
        if (chunk) {
            __syncthreads();  // all warps are done with the rows that the next ones replace
            copy_rows(chunk + ROW_STAGES - 1);
        }
        wait_for_bytes(barrier + chunk % ROW_STAGES * 8, chunk / ROW_STAGES % 2);
        u32 rows_at = row_ring + chunk % ROW_STAGES * ROW_STAGE + lane % 8 * ROW_BYTES + lane / 8 * 16;
        int count = min(ROW_CHUNK, inner - chunk * ROW_CHUNK) / CHUNK;
        auto load = [&](Fragments<TILES>& to, int step) {
            wait_copies<STAGES - 2>();
            __syncwarp();
            u32 line = ring + slot * STAGE + lane % 16 * 128;
#pragma unroll
            for (int k = 0; k < CHUNK / 16; ++k)
                load_matrices(to.outputs[k], line + (((2 * k + lane / 16) ^ (lane % 8)) * 16));
#pragma unroll
            for (int t = 0; t < TILES; ++t)
#pragma unroll
                for (int k = 0; k < CHUNK / 32; ++k)
                    load_matrices(to.rows[t][k], rows_at + t * 8 * ROW_BYTES + (step * CHUNK + k * 32) * 2);
            slot = slot + 1 == STAGES ? 0 : slot + 1;
        };
        auto multiply = [&](const Fragments<TILES>& by) {
#pragma unroll
            for (int k = 0; k < CHUNK / 16; ++k)
#pragma unroll
                for (int t = 0; t < TILES; ++t)
                    T::mma(sums[t], by.outputs[k], by.rows[t][k / 2][k % 2 * 2], by.rows[t][k / 2][k % 2 * 2 + 1]);
        };
        // Two chunks in turns: one is loaded while the other is multiplied.
        Fragments<TILES> even, odd;
        load(even, 0);
        for (int step = 0; step < count; step += 2) {
            copy_next();
            if (step + 1 < count) load(odd, step + 1);
            multiply(even);
            if (step + 1 >= count) break;
            copy_next();
            if (step + 2 < count) load(even, step + 2);
            multiply(odd);
        }
    }

#pragma unroll
    for (int t = 0; t < TILES; ++t)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            int output = first + lane / 4 + i / 2 * 8, row = 8 * t + lane % 4 * 2 + i % 2;
            u32 bits = T::pack(make_float2(sums[t][i], sums[t][i]));
            if (row < rows && output < width) out[static_cast<i64>(row) * pitch + output] = static_cast<u16>(bits);
        }
}

// The same for narrow weights, such as those of routers: all of a block's 16 outputs and 8 rows are copied by all
// warps, a row each, and the first one does nothing but multiply then, because its instructions take longer than the
// copies.
template <class T>
__device__ void narrow_rows(const u16* x, const u16* weight, int rows, int width, int inner, int pitch, u16* out) {
    extern __shared__ __align__(128) unsigned char memory[];  // [inner / CHUNK][STAGE], [8][inner + 8]
    int lane = threadIdx.x % 32, first = WARP_OUTPUTS * blockIdx.x, steps = inner / CHUNK;
    int first_row = 8 * blockIdx.y, last_row = min(rows - first_row, 8) - 1;
    u32 weights = shared_address(memory), kept = weights + steps * STAGE, row_bytes = 2 * (inner + 8);
    for (int at = threadIdx.x; at < WARP_OUTPUTS * inner / 8; at += blockDim.x) {
        int vector = at % 8, output = at / 8 % WARP_OUTPUTS, step = at / (8 * WARP_OUTPUTS);
        bool there = first + output < width;
        const u16* column = weight + static_cast<i64>(there ? first + output : 0) * inner + step * CHUNK + vector * 8;
        copy16(weights + step * STAGE + output * 128 + (vector ^ (output % 8)) * 16, column, there);
    }
    begin_next();
    wait_for_previous();
    int warp = threadIdx.x / 32;
    const u16* from = x + static_cast<i64>(first_row + min(warp, last_row)) * inner;
    for (int at = 8 * lane; at < inner; at += 8 * 32) copy16(kept + warp * row_bytes + 2 * at, from + at, true);
    close_copies();
    wait_copies<0>();
    __syncthreads();
    if (threadIdx.x >= 32) return;
    float sums[4] = {};
    u32 line = weights + lane % 16 * 128, row = kept + lane % 8 * row_bytes + lane / 8 * 16;
    auto load = [&](Fragments<1>& to, int step) {
#pragma unroll
        for (int k = 0; k < CHUNK / 16; ++k)
            load_matrices(to.outputs[k], line + step * STAGE + ((2 * k + lane / 16) ^ (lane % 8)) * 16);
#pragma unroll
        for (int k = 0; k < CHUNK / 32; ++k) load_matrices(to.rows[0][k], row + (step * CHUNK + k * 32) * 2);
    };
    auto multiply = [&](const Fragments<1>& by) {
#pragma unroll
        for (int k = 0; k < CHUNK / 16; ++k)
            T::mma(sums, by.outputs[k], by.rows[0][k / 2][k % 2 * 2], by.rows[0][k / 2][k % 2 * 2 + 1]);
    };
    Fragments<1> even, odd;
    load(even, 0);
    for (int step = 0; step < steps; step += 2) {
        if (step + 1 < steps) load(odd, step + 1);
        multiply(even);
        if (step + 1 >= steps) break;
        if (step + 2 < steps) load(even, step + 2);
        multiply(odd);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        int output = first + lane / 4 + i / 2 * 8, of = lane % 4 * 2 + i % 2;
        u32 bits = T::pack(make_float2(sums[i], sums[i]));
        if (of <= last_row && output < width)
            out[static_cast<i64>(first_row + of) * pitch + output] = static_cast<u16>(bits);
    }
}

#endif
