// Matmuls of experts whose rows are kept: a warp has 16 outputs of an expert over all inputs. A block keeps the rows of
// some items in shared memory, and its warps take one unit of these items after another.
#pragma once
#include "copy.cuh"
#include "early.cuh"
#include "experts_activation.cuh"
#include "experts_stream.cuh"

constexpr int KEPT_THREADS = 512;  // of a block, at most
constexpr int LINE = 128;          // bytes of an output that are copied together
constexpr int STAGE = 16 * LINE;   // of a warp's outputs
constexpr int UNIT_TIME = 8;       // the time of a unit: so many parts, and one more for each of its tiles

// The items of a launch, at least 32 of which are readable, and how their rows and weights are kept. `room`: rows that
// a block keeps. `stages`: lines of its weights that a warp copies ahead, and one.
struct Items {
    const int4* items;
    const int* count;
    int room, stages;
};

// The units of a block, numbered item * across + place: a part of all units that takes as long as that of every other
// block. `first` to `until` are the items whose rows are kept, at most `room` rows.
struct KeptUnits {
    const int4* items;
    bool fresh;  // they are read past this processor's own cache
    int count, across, room, begin, end, first, until;

    // All threads of a warp call it. A block has as many units for each of its warps, unless these have few.
    __device__ __forceinline__ KeptUnits(Items all, int across, bool fresh)
        : items(all.items), fresh(fresh), across(across), room(all.room) {
        int lane = threadIdx.x % 32;
        int4 first_items = item_at(lane);  // before it is known how many there are
        count = fresh ? load_count(all.count) : *all.count;
        int grain = count * across < 2 * warps() * static_cast<int>(gridDim.x) ? 1 : warps();
        int total = lane < count ? time_of(first_items) : 0;
        for (int item = lane + 32; item < count; item += 32) total += time_of(item_at(item));
        total = __reduce_add_sync(~0u, total);
        int places[2] = {count * across, count * across};  // the block's first unit, and the next block's
        for (int from = 0, before = 0; from < count; from += 32) {
            int item = from + lane, own = item < count ? time_of(from ? item_at(item) : first_items) : 0;
            int upto = own;
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
                int unit = mine ? static_cast<int>((into + own - 1) / own) : 0;
                int place = min((item * across + unit + grain - 1) / grain * grain, count * across);
                if (u32 lanes = __ballot_sync(~0u, mine)) places[i] = __shfl_sync(~0u, place, __ffs(lanes) - 1);
            }
            before += __shfl_sync(~0u, upto, 31);
        }
        begin = places[0];
        end = places[1];
        keep_from(begin / across);
    }
    __device__ __forceinline__ int4 item_at(int item) const { return fresh ? load_item(items + item) : items[item]; }
    static __device__ __forceinline__ int warps() { return blockDim.x / 32; }
    static __device__ __forceinline__ int time_of(int4 item) { return UNIT_TIME + (item.z + 7) / 8; }
    // Keep `item` and as many later ones as fit.
    __device__ __forceinline__ void keep_from(int item) {
        first = until = item;
        for (int rows = 0; until < count && until * across < end; ++until) {
            rows += item_at(until).z;
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

// A warp's weights of all of its units, copied to shared memory `stages` - 1 lines of its outputs ahead. ``row_of``
// gives the row of the weight for an expert, a unit's place and one of its 16 outputs. `length`: bytes of a row.
template <class Matmul, class RowOf>
struct KeptWeights {
    Matmul matmul;
    RowOf row_of;
    const u8* weight;
    KeptUnits units;
    int length, stages, unit, at = 0, slot = 0;
    uint4* ring;
    const u8* from[4];

    __device__ __forceinline__ KeptWeights(Matmul matmul, RowOf row_of, const u8* weight, KeptUnits units, int inner,
                                           int stages, uint4* ring)
        : matmul(matmul), row_of(row_of), weight(weight), units(units), length(matmul.row_bytes(inner)), stages(stages),
          ring(ring + threadIdx.x / 32 * stages * (STAGE / 16)) {
        unit = this->units.there_or_later(units.begin + threadIdx.x / 32);
        find();
#pragma unroll 1
        for (int i = 0; i < stages - 1; ++i) order();
    }
    __device__ __forceinline__ int lines() const { return (length + LINE - 1) / LINE; }
    __device__ __forceinline__ void find() {
        if (unit >= units.end) return;
        int item = unit / units.across, expert = units.item_at(item).x, lane = threadIdx.x % 32;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            int row = row_of(expert, unit - item * units.across, lane / 8 + 4 * i);
            from[i] = weight + static_cast<i64>(row) * length + lane % 8 * 16;
        }
        if (lane < 16) matmul.prefetch(row_of(expert, unit - item * units.across, lane));
    }
    // Where a vector of an output's line is among those of a stage. Eight outputs, or two and four vectors, that are
    // read at once use different banks.
    static __device__ __forceinline__ int place(int output, int vector) {
        return output * (LINE / 16) + (vector ^ (output % 2 * 4 + output / 2 % 4));
    }
    __device__ __forceinline__ void order() {
        if (unit < units.end) {
            int lane = threadIdx.x % 32;
            bool there = at + lane % 8 * 16 < length;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                uint4* to = ring + slot * (STAGE / 16) + place(lane / 8 + 4 * i, lane % 8);
                copy16(shared_address(to), from[i] + (there ? at : 0), there);
            }
            if ((at += LINE) >= length) {
                at = 0;
                unit = units.there_or_later(unit + units.warps());
                find();
            }
        }
        close_copies();
        slot = after(slot);
    }
    // Wait for the oldest ordered stage; its slot is the one after the newest.
    __device__ __forceinline__ const uint4* oldest() {
        if (stages == 6) wait_copies<4>();
        else if (stages == 4) wait_copies<2>();
        else if (stages == 3) wait_copies<1>();
        else wait_copies<0>();
        __syncwarp();
        return ring + after(slot) * (STAGE / 16);
    }
    __device__ __forceinline__ int after(int slot) const { return slot + 1 == stages ? 0 : slot + 1; }
};

// All units of a block. ``matmul`` says how a unit is multiplied. ``place_of``: where the row at a place of the sorted
// pairs is stored. ``store`` takes an item, the place of a unit, that of a row in the item, an output among 8, and the
// results of this one and of the 8th after it. ``ROUTED``: the pairs are routed, and the previous kernel makes only the
// rows.
template <bool ROUTED, class Matmul, class PlaceOf, class RowOf, class Store>
__device__ __forceinline__ void multiply_items(Matmul matmul, const u8* weight, Items all, int across, int inner,
                                               PlaceOf place_of, RowOf row_of, Store store) {
    extern __shared__ __align__(128) uint4 memory[];
    constexpr int AT_A_TIME = 8, TILES = Matmul::TILES;
    if (!ROUTED) wait_for_previous();
    begin_next();
    KeptUnits units(all, across, ROUTED);
    if (!units.there()) return;
    int warp = threadIdx.x / 32, warps = units.warps(), lane = threadIdx.x % 32;
    uint4* kept = memory + warps * all.stages * (STAGE / 16);
    int length = inner / 8, pitch = matmul.kept_pitch(inner);
    KeptWeights<Matmul, RowOf> weights(matmul, row_of, weight, units, inner, all.stages, memory);
    if (ROUTED) wait_for_previous();
    for (;;) {
        int place = all.items[units.first].y;
        int4 last = all.items[units.until - 1];
        int count = last.y + last.z - place;
        __syncthreads();
        for (int row = warp; row < count; row += warps) {
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
        for (int unit = units.kept_begin() + warp; unit < units.kept_end(); unit += warps) {
            int number = unit / across;
            int4 item = all.items[number];
            const uint4* rows[TILES];  // rows that do not exist are others: they change no other row's sum
#pragma unroll
            for (int tile = 0; tile < TILES; ++tile) {
                int row = min(item.y - place + 8 * tile + matmul.row(), all.room - 1);
                rows[tile] = kept + row * pitch + matmul.vector();
            }
            auto output_of = [&](int output) { return row_of(item.x, unit - number * across, output); };
            float sums[TILES][4] = {};
            int tiles = (item.z + 7) / 8;
            if (tiles == 1) matmul.template multiply<1>(weights, output_of, inner, rows, sums);
            else if (TILES == 2 || tiles == 2) matmul.template multiply<2>(weights, output_of, inner, rows, sums);
            else if (tiles == 3) matmul.template multiply<TILES == 2 ? 2 : 3>(weights, output_of, inner, rows, sums);
            else matmul.template multiply<TILES>(weights, output_of, inner, rows, sums);
#pragma unroll
            for (int tile = 0; tile < TILES; ++tile)
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

// A unit: 8 gates and their ups. activated[place of the pair] = ``value_of`` the gate's row of the weight and results.
template <class T, class Matmul, class ValueOf>
__device__ __forceinline__ void multiply_gate_up(Matmul matmul, const u16* x, const u8* weight, Items items,
                                                 const int* order, int hidden, int width, int per_token,
                                                 Activation<T> activation, u16* activated, ValueOf value_of) {
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
        float value = value_of(activation.gate_row(item.x, i, width), gate, up);
        store1<T>(activated + static_cast<i64>(item.y + row) * width + i, value);
    };
    multiply_items<false>(matmul, weight, items, width / 8, hidden, place_of, row_of, store);
}

// A unit: 16 outputs. ``store`` takes an expert, the place of a pair, an output and the results of it and of the 8th
// after it.
template <class Matmul, class Store>
__device__ __forceinline__ void multiply_down(Matmul matmul, const u16* activated, const u8* weight, Items items,
                                              int hidden, int width, Store store) {
    int length = width / 8;
    auto place_of = [=](int place) {
        return reinterpret_cast<const uint4*>(activated) + static_cast<i64>(place) * length;
    };
    auto row_of = [=](int expert, int unit, int output) { return expert * hidden + unit * 16 + output; };
    auto store_of = [=](int4 item, int unit, int row, int output, float first, float other) {
        store(item.x, item.y + row, unit * 16 + output, first, other);
    };
    multiply_items<true>(matmul, weight, items, hidden / 16, width, place_of, row_of, store_of);
}
