// Matmuls of a few rows with 16 outputs of stored weights. Each weight is read once, and loads overlap.
#pragma once
#include "elements.cuh"

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

    static __device__ __forceinline__ int vectors(int inner) { return inner * sizeof(typename T::Element) / 16; }
    __device__ __forceinline__ float factor(int) const { return 1; }
};

// Two outputs of the concatenated weights of all experts, or NONE.
struct Outputs { int upper, lower; };
constexpr Outputs NONE{-1, -1};

// What a format reads besides the numbers, for a thread's outputs in a chunk.
template <class Format>
struct Scales;

template <class T>
struct Scales<Unquantized<T>> {
    __device__ __forceinline__ Scales(Unquantized<T>, int) {}
    __device__ __forceinline__ void load(Outputs, int) {}
};

// A thread's weights of all units of its block, one after another, being copied to shared memory that it alone reads.
// So nothing waits between units, and no thread waits for another. ``expert_of`` gives the expert of a unit, read one
// unit ahead, and ``outputs_of`` its Outputs. A chunk is 8 vectors of 16 bytes of either output, 2 per thread; chunk c
// of part p of SPLIT is at c * SPLIT + p.
template <class Format, int SPLIT_, class ExpertOf, class OutputsOf>
struct Weights {
    static constexpr int SPLIT = SPLIT_;
    ExpertOf expert_of;
    OutputsOf outputs_of;
    const uint4* stored;
    int inner, length, part, unit, units, next = 0, chunk = 0, slot = 0;
    const uint4 *upper, *lower;  // null if they do not exist
    uint4* ring;                 // [RING][4][THREADS]

    __device__ __forceinline__ Weights(ExpertOf expert_of, OutputsOf outputs_of, const uint4* stored, int inner,
                                       int part, int units, uint4* ring)
        : expert_of(expert_of), outputs_of(outputs_of), stored(stored), inner(inner), length(Format::vectors(inner)),
          part(part), unit(blockIdx.x), units(units), ring(ring) {
        if (unit < units) find(expert_of(unit));
        if (unit + gridDim.x < units) next = expert_of(unit + gridDim.x);
        for (int i = 0; i + 1 < RING; ++i) order();
    }
    __device__ __forceinline__ void find(int expert) {
        Outputs outputs = outputs_of(unit, expert);
        upper = outputs.upper < 0 ? nullptr : stored + static_cast<i64>(outputs.upper) * length;
        lower = outputs.lower < 0 ? nullptr : stored + static_cast<i64>(outputs.lower) * length;
    }
    __device__ __forceinline__ int chunks() const { return (length + 8 * SPLIT - 1) / (8 * SPLIT); }
    __device__ __forceinline__ int vector(int chunk) const { return 8 * (chunk * SPLIT + part) + threadIdx.x % 4; }

    // The next chunk that is not ordered yet.
    __device__ __forceinline__ void order() {
        if (unit < units) {
            int k = vector(chunk);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const uint4* from = i < 2 ? upper : lower;
                bool there = from != nullptr && k + i % 2 * 4 < length;
                copy(ring + (slot * 4 + i) * THREADS + threadIdx.x, there ? from + k + i % 2 * 4 : stored, there);
            }
            if (++chunk == chunks()) {
                chunk = 0;
                unit += gridDim.x;
                if (unit < units) find(next);
                if (unit + gridDim.x < units) next = expert_of(unit + gridDim.x);
            }
        }
        asm volatile("cp.async.commit_group;" ::: "memory");
        slot = (slot + 1) % RING;
    }
    // Wait for the oldest ordered chunk; its slot is the one after the newest.
    __device__ __forceinline__ const uint4* oldest() {
        asm volatile("cp.async.wait_group %0;" ::"n"(RING - 2) : "memory");
        return ring + (slot + 1) % RING * 4 * THREADS + threadIdx.x;
    }
    static __device__ __forceinline__ void copy(uint4* to, const uint4* from, bool there) {
        u32 address = static_cast<u32>(__cvta_generic_to_shared(to));
        asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(address), "l"(from),
                     "r"(there ? 16 : 0)
                     : "memory");
    }
};

// ``sums`` of 8 * TILES rows (``tiles`` tiles exist) over the warp's part of a unit's inputs. Rows are null if
// they do not exist.
template <class T, int TILES, class Weights>
__device__ __forceinline__ void multiply(Weights& weights, Scales<Unquantized<T>>&, Outputs, Outputs,
                                         const uint4* const (&rows)[TILES], int tiles, Sums<T> (&sums)[TILES]) {
    using Input = typename Sums<T>::Input;
    auto load = [&](Input(&x)[2], int tile, int chunk) {
        int k = weights.vector(chunk);
        x[0] = Sums<T>::load(rows[tile], k, weights.length);
        x[1] = Sums<T>::load(rows[tile], k + 4, weights.length);
    };
    Input x[TILES][2];
    load(x[0], 0, 0);
    for (int chunk = 0; chunk < weights.chunks(); ++chunk) {
#pragma unroll
        for (int tile = 1; tile < TILES; ++tile) {
            if (tile >= tiles) break;
            load(x[tile], tile, chunk);
        }
        Input ahead[2];  // of the first tile, often the only one
        load(ahead, 0, chunk + 1);
        const uint4* found = weights.oldest();
        uint4 upper[2] = {found[0], found[THREADS]}, lower[2] = {found[2 * THREADS], found[3 * THREADS]};
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) {
            if (tile >= tiles) break;
            sums[tile].add(upper[0], lower[0], x[tile][0]);
            sums[tile].add(upper[1], lower[1], x[tile][1]);
        }
        weights.order();
        x[0][0] = ahead[0];
        x[0][1] = ahead[1];
    }
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) sums[tile].finish();
}
