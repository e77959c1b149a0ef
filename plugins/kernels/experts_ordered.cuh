// The matmuls of experts in 16 bits. A warp has 16 outputs of an expert and adds their inputs in order, 16 at a time,
// as torch's grouped matmuls do: where these give equal bits, a row has them among any number of rows. A block keeps
// the rows of some items in shared memory, and its warps take one unit of these items after another.
#pragma once
#include "copy.cuh"
#include "early.cuh"
#include "experts_activation.cuh"
#include "experts_stream.cuh"

constexpr int CHUNK = 64;              // inputs of a warp's outputs that are copied together
constexpr int STAGE = 2 * CHUNK * 16;  // bytes
constexpr int KEPT_TILES = ITEM_ROWS / 8;
constexpr int UNIT_TIME = 8;  // the time of a unit: so many parts, and one more for each of its tiles

// The items of a launch, at least 32 of which are readable, and how their rows and weights are kept. `room`: rows that
// a block keeps. `stages`: chunks of its weights that a warp copies ahead, and one.
struct Items {
    const int4* items;
    const int* count;
    int room, stages;
};

// The units of a block, numbered item * across + place: a part of all units that takes as long as that of every other
// block. `first` to `until` are the items whose rows are kept, at most `room` rows.
struct KeptUnits {
    const int4* items;
    int count, across, room, begin, end, first, until;

    // All threads of a warp call it. Within an item, a block begins with a unit for its first warp.
    __device__ __forceinline__ KeptUnits(Items all, int across) : items(all.items), across(across), room(all.room) {
        int lane = threadIdx.x % 32;
        int4 first_items = items[lane];  // before it is known how many there are
        count = *all.count;
        int total = lane < count ? time_of(first_items) : 0;
        for (int item = lane + 32; item < count; item += 32) total += time_of(items[item]);
        total = __reduce_add_sync(~0u, total);
        int places[2] = {count * across, count * across};  // the block's first unit, and the next block's
        for (int from = 0, before = 0; from < count; from += 32) {
            int item = from + lane, own = item < count ? time_of(from ? items[item] : first_items) : 0, upto = own;
#pragma unroll
            for (int by = 1; by < 32; by *= 2) {
                int lower = __shfl_up_sync(~0u, upto, by);
                if (lane >= by) upto += lower;
            }
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                i64 at = static_cast<i64>(total) * across * (blockIdx.x + i) / gridDim.x;
                i64 into = at - static_cast<i64>(before + upto - own) * across;  // parts of the lane's item
                bool mine = own > 0 && into >= 0 && into < static_cast<i64>(own) * across;
                int unit = mine ? (static_cast<int>((into + own - 1) / own) + WARPS - 1) / WARPS * WARPS : 0;
                int place = item * across + min(unit, across);
                if (u32 lanes = __ballot_sync(~0u, mine)) places[i] = __shfl_sync(~0u, place, __ffs(lanes) - 1);
            }
            before += __shfl_sync(~0u, upto, 31);
        }
        begin = places[0];
        end = places[1];
        keep_from(begin / across);
    }
    static __device__ __forceinline__ int time_of(int4 item) { return UNIT_TIME + (item.z + 7) / 8; }
    // Keep `item` and as many later ones as fit.
    __device__ __forceinline__ void keep_from(int item) {
        first = until = item;
        for (int rows = 0; until < count && until * across < end; ++until) {
            rows += items[until].z;
            if (until > item && rows > room) break;
        }
    }
    __device__ __forceinline__ bool there() const { return begin < end; }
    __device__ __forceinline__ bool more() const { return until * across < end; }
    __device__ __forceinline__ int kept_begin() const { return max(begin, first * across); }
    __device__ __forceinline__ int kept_end() const { return min(end, until * across); }
    // `unit`, or the warp's first one of the next items that have one for it; `end` or more: none.
    __device__ __forceinline__ int there_or_later(int unit) {
        while (unit >= kept_end() && more()) {
            keep_from(until);
            unit = kept_begin() + threadIdx.x / 32;
        }
        return unit;
    }
};

// A warp's weights of all of its units, copied to shared memory `stages` - 1 chunks ahead. ``row_of`` gives the row of
// the weight for an expert, a unit's place and one of its 16 outputs.
template <class RowOf>
struct KeptWeights {
    RowOf row_of;
    const u16* weight;
    KeptUnits units;
    int inner, stages, unit, chunk = 0, slot = 0;
    u32 ring;
    const u16* from[4];

    __device__ __forceinline__ KeptWeights(RowOf row_of, const u16* weight, KeptUnits units, int inner, int stages,
                                           u32 ring)
        : row_of(row_of), weight(weight), units(units), inner(inner), stages(stages),
          ring(ring + threadIdx.x / 32 * stages * STAGE) {
        unit = this->units.there_or_later(units.begin + threadIdx.x / 32);
        find();
#pragma unroll 1
        for (int i = 0; i < stages - 1; ++i) order();
    }
    __device__ __forceinline__ int chunks() const { return (inner + CHUNK - 1) / CHUNK; }
    __device__ __forceinline__ void find() {
        if (unit >= units.end) return;
        int item = unit / units.across, expert = units.items[item].x, lane = threadIdx.x % 32;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            int row = row_of(expert, unit - item * units.across, lane / 8 + 4 * i);
            from[i] = weight + static_cast<i64>(row) * inner + lane % 8 * 8;
        }
    }
    __device__ __forceinline__ void order() {
        if (unit < units.end) {
            int lane = threadIdx.x % 32, at = chunk * CHUNK;
            bool there = at + lane % 8 * 8 < inner;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                int output = lane / 8 + 4 * i;
                u32 place = ring + slot * STAGE + output * 128 + ((lane % 8) ^ (output % 8)) * 16;
                copy16(place, from[i] + (there ? at : 0), there);
            }
            if (++chunk == chunks()) {
                chunk = 0;
                unit = units.there_or_later(unit + WARPS);
                find();
            }
        }
        close_copies();
        slot = after(slot);
    }
    // Wait for the oldest ordered chunk; its slot is the one after the newest.
    __device__ __forceinline__ u32 oldest() {
        if (stages == 6) wait_copies<4>();
        else if (stages == 4) wait_copies<2>();
        else wait_copies<0>();
        __syncwarp();
        return ring + after(slot) * STAGE;
    }
    __device__ __forceinline__ int after(int slot) const { return slot + 1 == stages ? 0 : slot + 1; }
};

// ``sums`` of COUNT tiles of rows over all inputs. `rows`: where load_matrices finds the lane's row of each tile.
template <class T, int COUNT, class Weights>
__device__ __forceinline__ void multiply_kept(Weights& weights, const u32 (&rows)[KEPT_TILES],
                                              float (&sums)[KEPT_TILES][4]) {
    int lane = threadIdx.x % 32, chunks = weights.chunks();
    for (int chunk = 0; chunk < chunks; ++chunk) {
        u32 line = weights.oldest() + lane % 16 * 128;
        u32 outputs[CHUNK / 16][4], x[COUNT][CHUNK / 32][4];
#pragma unroll
        for (int k = 0; k < CHUNK / 16; ++k) load_matrices(outputs[k], line + ((2 * k + lane / 16) ^ (lane % 8)) * 16);
#pragma unroll
        for (int tile = 0; tile < COUNT; ++tile)
#pragma unroll
            for (int k = 0; k < CHUNK / 32; ++k) load_matrices(x[tile][k], rows[tile] + (chunk * CHUNK + k * 32) * 2);
        weights.order();
#pragma unroll
        for (int k = 0; k < CHUNK / 16; ++k)
#pragma unroll
            for (int tile = 0; tile < COUNT; ++tile)
                T::mma(sums[tile], outputs[k], x[tile][k / 2][k % 2 * 2], x[tile][k / 2][k % 2 * 2 + 1]);
    }
}

// Vectors from one kept row to the next, so that eight rows which are read at once use different banks.
__device__ __forceinline__ int kept_pitch(int inner) { return (inner + CHUNK - 1) / CHUNK * (CHUNK / 8) + 1; }

// All units of a block. ``place_of``: where the row at a place of the sorted pairs is stored. ``store`` takes an item,
// the place of a unit, that of a row in the item, an output among 8, and the results of this one and of the 8th after
// it.
template <class T, class PlaceOf, class RowOf, class Store>
__device__ __forceinline__ void multiply_items(const u16* weight, Items all, int across, int inner, PlaceOf place_of,
                                               RowOf row_of, Store store) {
    extern __shared__ __align__(128) uint4 memory[];
    constexpr int AT_A_TIME = 8;
    begin_next();
    wait_for_previous();
    KeptUnits units(all, across);
    if (!units.there()) return;
    uint4* kept = memory + WARPS * all.stages * (STAGE / 16);
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, length = inner / 8, pitch = kept_pitch(inner);
    KeptWeights<RowOf> weights(row_of, weight, units, inner, all.stages, shared_address(memory));
    for (;;) {
        int place = all.items[units.first].y;
        int4 last = all.items[units.until - 1];
        int count = last.y + last.z - place;
        __syncthreads();
        for (int row = warp; row < count; row += WARPS) {
            const uint4* from = place_of(place + row);
            for (int begin = lane; begin < pitch; begin += 32 * AT_A_TIME) {
                uint4 values[AT_A_TIME];
#pragma unroll
                for (int i = 0; i < AT_A_TIME; ++i)
                    values[i] = begin + 32 * i < length ? __ldg(from + begin + 32 * i) : make_uint4(0, 0, 0, 0);
#pragma unroll
                for (int i = 0; i < AT_A_TIME; ++i)
                    if (begin + 32 * i < pitch) kept[row * pitch + begin + 32 * i] = values[i];
            }
        }
        __syncthreads();
        for (int unit = units.kept_begin() + warp; unit < units.kept_end(); unit += WARPS) {
            int number = unit / across;
            int4 item = all.items[number];
            u32 rows[KEPT_TILES];  // rows that do not exist are others: they change no other row's sum
#pragma unroll
            for (int tile = 0; tile < KEPT_TILES; ++tile) {
                int row = min(item.y - place + 8 * tile + lane % 8, all.room - 1);
                rows[tile] = shared_address(kept + row * pitch + lane / 8);
            }
            float sums[KEPT_TILES][4] = {};
            int tiles = (item.z + 7) / 8;
            if (tiles == 1) multiply_kept<T, 1>(weights, rows, sums);
            else if (tiles == 2) multiply_kept<T, 2>(weights, rows, sums);
            else if (tiles == 3) multiply_kept<T, 3>(weights, rows, sums);
            else multiply_kept<T, 4>(weights, rows, sums);
#pragma unroll
            for (int tile = 0; tile < KEPT_TILES; ++tile)
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    int row = 8 * tile + lane % 4 * 2 + i;
                    if (row < item.z)
                        store(item, unit - number * across, row, lane / 4, sums[tile][i], sums[tile][i + 2]);
                }
        }
        if (!units.more()) return;
        units.keep_from(units.until);
    }
}

template <class T>
__device__ __forceinline__ float rounded(float x) {
    return T::rounded2(make_float2(x, 0)).x;
}

// A unit: 8 gates and their ups, for activated[place of the pair].
template <class T>
__device__ void gate_up_ordered(const u16* x, const u16* weight, Items items, int hidden, int width, const int* order,
                                int per_token, Activation<T> activation, u16* activated) {
    int length = hidden / 8;
    auto place_of = [=](int place) {
        return reinterpret_cast<const uint4*>(x) + static_cast<i64>(order[place] / per_token) * length;
    };
    auto row_of = [=](int expert, int unit, int output) {
        int gate = activation.gate_row(expert, unit * 8 + output % 8, width);
        return output < 8 ? gate : gate + activation.step(width);
    };
    auto store = [=](int4 item, int unit, int row, int output, float gate, float up) {
        int i = unit * 8 + output;
        float2 biases = activation.biases(activation.gate_row(item.x, i, width), width);
        float value = activation(rounded<T>(gate), rounded<T>(up), biases);
        store1<T>(activated + static_cast<i64>(item.y + row) * width + i, value);
    };
    multiply_items<T>(weight, items, width / 8, hidden, place_of, row_of, store);
}

// A unit: 16 outputs[place of the pair].
template <class T>
__device__ void down_ordered(const u16* activated, const u16* weight, Items items, int hidden, int width,
                             u16* outputs) {
    int length = width / 8;
    auto place_of = [=](int place) {
        return reinterpret_cast<const uint4*>(activated) + static_cast<i64>(place) * length;
    };
    auto row_of = [=](int expert, int unit, int output) { return expert * hidden + unit * 16 + output; };
    auto store = [=](int4 item, int unit, int row, int output, float first, float other) {
        u16* to = outputs + static_cast<i64>(item.y + row) * hidden + unit * 16 + output;
        store1<T>(to, first);
        store1<T>(to + 8, other);
    };
    multiply_items<T>(weight, items, hidden / 16, width, place_of, row_of, store);
}
