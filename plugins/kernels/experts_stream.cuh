// Matmuls of a few rows with 16 outputs of stored weights. Each weight is read once, and loads overlap.
#pragma once
#include "elements.cuh"
#include "intrinsics.cuh"

constexpr int ITEM_ROWS = 32;  // pairs of one expert that a block multiplies at a time
constexpr int WARPS = 8, THREADS = 32 * WARPS;
constexpr int RING = 4;  // chunks of weights being copied for a warp at a time

// A warp's sums for 16 outputs and 8 rows: thread 4 * g + t has outputs g and g + 8 of rows 2 * t and 2 * t + 1, as
// tensor cores leave them. It reads outputs g and g + 8 and row g, 16 bytes at a time, which are other inputs than the
// fragments specify: the order of a sum's terms does not matter, and weights and rows are permuted alike.
template <class T>
struct Sums {
    using Input = uint4;
    float at[4] = {};

    static __device__ __forceinline__ Input load(const uint4* row, int k, int length) {
        return row != nullptr && k < length ? __ldg(row + k) : make_uint4(0, 0, 0, 0);
    }
    __device__ __forceinline__ void add(uint4 upper, uint4 lower, Input x) {
        T::mma(at, {upper.x, lower.x, upper.y, lower.y}, x.x, x.y);
        T::mma(at, {upper.z, lower.z, upper.w, lower.w}, x.z, x.w);
    }
    __device__ __forceinline__ void finish() {}
};

// In float32 without tensor cores: every thread of a quarter has a share of all rows' inputs.
template <>
struct Sums<Fp32> {
    struct Input {
        const uint4* row;
        int k;
    };
    float at[4], all[2][8] = {};

    static __device__ __forceinline__ Input load(const uint4* row, int k, int length) {
        return {k < length ? row : nullptr, k < length ? k : 0};
    }
    __device__ __forceinline__ void add(uint4 upper, uint4 lower, Input x) {
        const float* high = reinterpret_cast<const float*>(&upper);
        const float* low = reinterpret_cast<const float*>(&lower);
#pragma unroll
        for (int r = 0; r < 8; ++r) {
            auto address = __shfl_sync(~0u, reinterpret_cast<unsigned long long>(x.row), 4 * r);
            if (!address) continue;
            uint4 bits = __ldg(reinterpret_cast<const uint4*>(address) + x.k);
            const float* values = reinterpret_cast<const float*>(&bits);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                all[0][r] += high[i] * values[i];
                all[1][r] += low[i] * values[i];
            }
        }
    }
    __device__ __forceinline__ void finish() {
#pragma unroll
        for (int r = 0; r < 16; ++r) {
            float& sum = all[r / 8][r % 8];
            sum += __shfl_xor_sync(~0u, sum, 1);
            sum += __shfl_xor_sync(~0u, sum, 2);
            if (r % 8 / 2 == threadIdx.x % 4) at[2 * (r / 8) + r % 2] = sum;
        }
    }
};

// A format of weights in the type that is multiplied.
template <class T_>
struct Unquantized {
    using T = T_;

    static constexpr int PARTS = 1, GATE_SPLIT = 8;
    static constexpr bool WHOLE_TILES = false;
    static __device__ __forceinline__ int vectors(int inner) { return inner * sizeof(typename T::Element) / 16; }
    __device__ __forceinline__ float factor(int) const { return 1; }
};

// Two outputs of the concatenated weights of all experts, or NONE.
struct Outputs { int upper, lower; };
constexpr Outputs NONE{-1, -1};

// Of routed pairs, for kernels that begin before the one after the routing has ended: past this processor's own cache,
// which may have those of an earlier layer.
__device__ __forceinline__ int4 load_item(const int4* item) {
    uint4 x = load_fresh(reinterpret_cast<const uint4*>(item));
    return make_int4(x.x, x.y, x.z, x.w);
}
__device__ __forceinline__ int load_count(const int* count) { return load_fresh(reinterpret_cast<const u32*>(count)); }

// The work of a launch: every item has `across` units. A block takes a unit and then every gridDim.x-th.
struct Unit { int item, place; };
struct Units {
    int items, across, item_step, place_step;

    __device__ __forceinline__ Units(int items, int across)
        : items(items), across(across), item_step(gridDim.x / across), place_step(gridDim.x % across) {}
    __device__ __forceinline__ Unit first() const {
        return {static_cast<int>(blockIdx.x) / across, static_cast<int>(blockIdx.x) % across};
    }
    __device__ __forceinline__ bool there(Unit unit) const { return unit.item < items; }
    __device__ __forceinline__ Unit after(Unit unit) const {
        unit = {unit.item + item_step, unit.place + place_step};
        return unit.place < across ? unit : Unit{unit.item + 1, unit.place - across};
    }
};

// What a format reads besides the numbers, for a thread's outputs in a chunk.
template <class Format>
struct Scales;

template <class T>
struct Scales<Unquantized<T>> {
    __device__ __forceinline__ Scales(Unquantized<T>, int) {}
    __device__ __forceinline__ void load(Outputs, int, int) {}
    __device__ __forceinline__ void prefetch(Outputs, int, int) const {}
};

// A thread's weights of all units of its block, one after another, being copied to shared memory that it alone reads.
// So nothing waits between units, and no thread waits for another. ``expert_of`` gives the expert of an item, read one
// unit ahead, and ``outputs_of`` the Outputs of a unit. A chunk is 8 vectors of 16 bytes of either output, 2 per
// thread, in PARTS pieces of neighbours; piece i of chunk c of part p of SPLIT is at (c * PARTS + i) * SPLIT + p.
template <class Format, int SPLIT_, class ExpertOf, class OutputsOf, class BlockUnits = Units>
struct Weights {
    static constexpr int SPLIT = SPLIT_, PARTS = Format::PARTS, STRIDE = PARTS == 1 ? 4 : 4 * SPLIT;
    ExpertOf expert_of;
    OutputsOf outputs_of;
    const uint4* stored;
    BlockUnits units;
    Unit unit;  // that is being ordered
    int inner, length, part, next = 0, slot = 0;
    int at;                      // the first vector of the thread in the chunk that is ordered next
    const uint4 *upper, *lower;  // of the outputs; null if they do not exist
    uint4* ring;                 // [RING][4][THREADS], from the thread's place on

    __device__ __forceinline__ Weights(ExpertOf expert_of, OutputsOf outputs_of, const uint4* stored, int inner,
                                       int part, BlockUnits units, uint4* ring)
        : expert_of(expert_of), outputs_of(outputs_of), stored(stored), units(units), unit(units.first()), inner(inner),
          length(Format::vectors(inner)), part(part), at(vector(0)), ring(ring + threadIdx.x) {
        if (units.there(unit)) find(expert_of(unit.item));
        find_next();
        for (int i = 0; i + 1 < RING; ++i) order();
    }
    __device__ __forceinline__ void find_next() {
        Unit after = units.after(unit);
        if (units.there(after)) next = expert_of(after.item);
    }
    __device__ __forceinline__ void find(int expert) {
        Outputs outputs = outputs_of(unit, expert);
        upper = outputs.upper < 0 ? nullptr : stored + static_cast<i64>(outputs.upper) * length;
        lower = outputs.lower < 0 ? nullptr : stored + static_cast<i64>(outputs.lower) * length;
    }
    __device__ __forceinline__ int chunks() const { return (length + 8 * SPLIT - 1) / (8 * SPLIT); }
    __device__ __forceinline__ int piece(int chunk, int i) const { return (chunk * PARTS + i) * SPLIT + part; }
    // The first of a thread's two vectors; the other follows after STRIDE.
    __device__ __forceinline__ int vector(int chunk) const { return 8 / PARTS * piece(chunk, 0) + threadIdx.x % 4; }

    // The next chunk that is not ordered yet.
    __device__ __forceinline__ void order() {
        if (units.there(unit)) {
            uint4* to = ring + slot * 4 * THREADS;
            bool first = upper != nullptr && at < length, second = upper != nullptr && at + STRIDE < length;
            copy(to, upper + at, first);
            copy(to + THREADS, upper + at + STRIDE, second);
            copy(to + 2 * THREADS, lower + at, first);
            copy(to + 3 * THREADS, lower + at + STRIDE, second);
            at += 8 * SPLIT;
            if (at - threadIdx.x % 4 - 8 / PARTS * part >= length) {
                at = vector(0);
                unit = units.after(unit);
                if (units.there(unit)) find(next);
                find_next();
            }
        }
        asm volatile("cp.async.commit_group;" ::: "memory");
        slot = (slot + 1) % RING;
    }
    // Wait for the oldest ordered chunk; its slot is the one after the newest.
    __device__ __forceinline__ const uint4* oldest() {
        asm volatile("cp.async.wait_group %0;" ::"n"(RING - 2) : "memory");
        return ring + (slot + 1) % RING * 4 * THREADS;
    }
    static __device__ __forceinline__ void copy(uint4* to, const uint4* from, bool there) {
        u32 address = static_cast<u32>(__cvta_generic_to_shared(to));
        asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(address), "l"(from),
                     "r"(there ? 16 : 0)
                     : "memory");
    }
};

// A thread's inputs of the first tile in the chunk that is multiplied next, loaded while the one before it is.
template <class Format>
struct Ahead;

template <class T>
struct Ahead<Unquantized<T>> {
    typename Sums<T>::Input x[2];

    template <class Weights>
    __device__ __forceinline__ void load(const Weights& weights, const uint4* row, int chunk) {
        int k = weights.vector(chunk);
        x[0] = Sums<T>::load(row, k, weights.length);
        x[1] = Sums<T>::load(row, k + 4, weights.length);
    }
};

// ``sums`` of 8 * TILES rows (``tiles`` tiles exist) over the warp's part of a unit's inputs. Rows are null if
// they do not exist. ``next_row``: the thread's first row in the next unit.
template <class T, int TILES, class Weights>
__device__ __forceinline__ void multiply(Weights& weights, Scales<Unquantized<T>>&, Outputs, Outputs,
                                         const uint4* const (&rows)[TILES], const uint4* next_row,
                                         Ahead<Unquantized<T>>& first, int tiles, bool, Sums<T> (&sums)[TILES]) {
    using Input = typename Sums<T>::Input;
    auto load = [&](Input(&x)[2], int tile, int chunk) {
        int k = weights.vector(chunk);
        x[0] = Sums<T>::load(rows[tile], k, weights.length);
        x[1] = Sums<T>::load(rows[tile], k + 4, weights.length);
    };
    Input x[TILES][2];
    for (int chunk = 0; chunk < weights.chunks(); ++chunk) {
#pragma unroll
        for (int tile = 1; tile < TILES; ++tile) {
            if (tile >= tiles) break;
            load(x[tile], tile, chunk);
        }
        x[0][0] = first.x[0];
        x[0][1] = first.x[1];
        bool more = chunk + 1 < weights.chunks();
        first.load(weights, more ? rows[0] : next_row, more ? chunk + 1 : 0);
        const uint4* found = weights.oldest();
        uint4 upper[2] = {found[0], found[THREADS]}, lower[2] = {found[2 * THREADS], found[3 * THREADS]};
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) {
            if (tile >= tiles) break;
            sums[tile].add(upper[0], lower[0], x[tile][0]);
            sums[tile].add(upper[1], lower[1], x[tile][1]);
        }
        weights.order();
    }
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) sums[tile].finish();
}
