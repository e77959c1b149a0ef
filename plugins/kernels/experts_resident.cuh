// Gate and up of experts for many rows: a block keeps an item's rows in shared memory for all of its units, which
// follow one another. The terms of a sum are added in the order of experts_matmuls.cuh, so a row has the same bits
// there and here.
#pragma once
#include "experts_matmuls.cuh"

// The time of a unit: so many parts, and one more for each of its tiles.
constexpr int UNIT_PARTS = 8;

// The units of a block: a part of all units in their order that takes as long as that of every other block.
struct NextUnits {
    int across, end;
    Unit begin;

    // All threads of a warp call it.
    __device__ __forceinline__ NextUnits(const int4* items, int count, int across) : across(across) {
        int lane = threadIdx.x % 32, total = 0;
        for (int item = lane; item < count; item += 32) total += parts_of(items[item]);
        total = __reduce_add_sync(~0u, total);
        int places[2] = {count * across, count * across};  // the block's first unit, and the next block's
        for (int first = 0, before = 0; first < count; first += 32) {
            int item = first + lane, own = item < count ? parts_of(items[item]) : 0, until = own;
#pragma unroll
            for (int by = 1; by < 32; by *= 2) {
                int lower = __shfl_up_sync(~0u, until, by);
                if (lane >= by) until += lower;
            }
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                i64 at = static_cast<i64>(total) * across * (blockIdx.x + i) / gridDim.x;
                i64 into = at - static_cast<i64>(before + until - own) * across;  // parts of the lane's item
                bool mine = own > 0 && into >= 0 && into < static_cast<i64>(own) * across;
                int place = mine ? item * across + static_cast<int>((into + own - 1) / own) : 0;
                if (u32 lanes = __ballot_sync(~0u, mine)) places[i] = __shfl_sync(~0u, place, __ffs(lanes) - 1);
            }
            before += __shfl_sync(~0u, until, 31);
        }
        begin = {places[0] / across, places[0] % across};
        end = places[1];
    }
    static __device__ __forceinline__ int parts_of(int4 item) { return UNIT_PARTS + (item.z + 7) / 8; }
    __device__ __forceinline__ Unit first() const { return begin; }
    __device__ __forceinline__ bool there(Unit unit) const { return unit.item * across + unit.place < end; }
    __device__ __forceinline__ Unit after(Unit unit) const {
        return unit.place + 1 < across ? Unit{unit.item, unit.place + 1} : Unit{unit.item + 1, 0};
    }
};

// Where vector `k` of a row is among `length`: eight threads that read two rows at once use different banks.
__device__ __forceinline__ int resident_at(int row, int k, int length) { return row * length + (k ^ (row % 2 * 4)); }

// Copy `count` rows of `length` vectors; ``row_of`` gives a row's address. The block meets before and after.
template <class RowOf>
__device__ __forceinline__ void keep_rows(uint4* resident, int count, int length, RowOf row_of) {
    constexpr int AT_A_TIME = 8;
    __syncthreads();
    for (int row = threadIdx.x / 32; row < count; row += WARPS) {
        const uint4* from = row_of(row);
        for (int begin = threadIdx.x % 32; begin < length; begin += 32 * AT_A_TIME) {
            uint4 values[AT_A_TIME];
#pragma unroll
            for (int i = 0; i < AT_A_TIME; ++i)
                if (begin + 32 * i < length) values[i] = __ldg(from + begin + 32 * i);
#pragma unroll
            for (int i = 0; i < AT_A_TIME; ++i)
                if (begin + 32 * i < length) resident[resident_at(row, begin + 32 * i, length)] = values[i];
        }
    }
    __syncthreads();
}

// ``sums`` of `tiles` tiles over the warp's part of a unit's inputs. Rows that do not exist are whatever is there: they
// change no other row's sum.
template <class T, int COUNT, class Weights>
__device__ __forceinline__ void multiply_resident(Weights& weights, const uint4* resident, int length,
                                                  Sums<T> (&sums)[TILES]) {
    int g = threadIdx.x % 32 / 4, swapped = g % 2 * 4;
    const uint4* from = resident + g * length;
    for (int chunk = 0; chunk < weights.chunks(); ++chunk) {
        int k = weights.vector(chunk);
        uint4 x[COUNT][2];
#pragma unroll
        for (int tile = 0; tile < COUNT; ++tile) {
            x[tile][0] = from[8 * tile * length + (k ^ swapped)];
            x[tile][1] = from[8 * tile * length + (k + 4 ^ swapped)];
        }
        const uint4* found = weights.oldest();
        uint4 upper[2] = {found[0], found[THREADS]}, lower[2] = {found[2 * THREADS], found[3 * THREADS]};
        weights.order();
#pragma unroll
        for (int tile = 0; tile < COUNT; ++tile) {
            sums[tile].add(upper[0], lower[0], x[tile][0]);
            sums[tile].add(upper[1], lower[1], x[tile][1]);
        }
    }
}

template <class T, class Weights>
__device__ __forceinline__ void multiply_resident(Weights& weights, const uint4* resident, int length, int tiles,
                                                  Sums<T> (&sums)[TILES]) {
    if (tiles == 1) multiply_resident<T, 1>(weights, resident, length, sums);
    else if (tiles == 2) multiply_resident<T, 2>(weights, resident, length, sums);
    else if (tiles == 3) multiply_resident<T, 3>(weights, resident, length, sums);
    else multiply_resident<T, 4>(weights, resident, length, sums);
}

// As gate_up. Inputs are a multiple of 64 * GATE_SPLIT.
template <class T>
__device__ void gate_up_resident(const u16* x, const void* weight, const int* order, const int4* items,
                                 const int* item_count, int hidden, int width, int per_token, Activation<T> activation,
                                 u16* activated) {
    using Format = Unquantized<T>;
    constexpr int SPLIT = Format::GATE_SPLIT, GATES = 8 * WARPS / SPLIT;
    extern __shared__ uint4 ring[];
    __shared__ Shared shared;
    begin_next();
    wait_for_previous();
    uint4* resident = ring + RING * 4 * THREADS;
    int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, across = width / GATES, length = hidden / 8, turn = 0;
    NextUnits units(items, *item_count, across);
    Unit unit = units.first();
    if (!units.there(unit)) return;
    auto expert_of = [=](int item) { return items[item].x; };
    auto outputs_of = [=](Unit unit, int expert) {
        int gate = activation.gate_row(expert, unit.place * GATES + warp / SPLIT * 8 + g, width);
        return Outputs{gate, gate + activation.step(width)};
    };
    Weights<Format, SPLIT, decltype(expert_of), decltype(outputs_of), NextUnits> weights(
        expert_of, outputs_of, static_cast<const uint4*>(weight), hidden, warp % SPLIT, units, ring);
    int mine = THREADS - 1 - threadIdx.x;
    int4 item;
    for (int kept = -1; units.there(unit); turn ^= 1, unit = units.after(unit)) {
        if (unit.item != kept) {
            kept = unit.item;
            item = items[kept];
            keep_rows(resident, item.z, length, [&](int row) {
                return reinterpret_cast<const uint4*>(x) + static_cast<i64>(order[item.y + row] / per_token) * length;
            });
        }
        int first = unit.place * GATES, count = item.z;
        int own = activation.gate_row(item.x, first + mine % GATES, width);
        float2 biases = activation.biases(own, width);
        Sums<T> sums[TILES];
        multiply_resident<T>(weights, resident, length, (count + 7) / 8, sums);
        keep<T>(shared[turn][warp], sums, (count + 7) / 8);
        __syncthreads();
        store_activated<T, SPLIT>(shared[turn], mine, count, 1.0f, 1.0f, biases, activation,
                                  activated + static_cast<i64>(item.y) * width + first, width);
    }
}
