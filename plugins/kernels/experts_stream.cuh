// Products of a few rows with 16 outputs of a stored weight, which is read once, past the first-level cache.
#pragma once
#include "elements.cuh"

__device__ __forceinline__ uint4 load_once(const uint4* at) {
    uint4 x;
    asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "l"(at));
    return x;
}

// What a warp has of 16 outputs and 8 rows: thread 4 * g + t outputs g and g + 8 of rows 2 * t and 2 * t + 1, as the
// tensor cores leave it. It reads outputs g and g + 8 and row g, 16 bytes at a time, which are other inputs than the
// fragments say: sums know no order, and weights and rows are taken alike.
template <class T>
struct Sums {
    float at[4] = {};

    __device__ __forceinline__ void add(uint4 upper, uint4 lower, const uint4* row, int k) {
        uint4 x = row == nullptr ? make_uint4(0, 0, 0, 0) : __ldg(row + k);
        T::product(at, {upper.x, lower.x, upper.y, lower.y}, x.x, x.y);
        T::product(at, {upper.z, lower.z, upper.w, lower.w}, x.z, x.w);
    }
    __device__ __forceinline__ void finish() {}
};

// In float32 without tensor cores: every thread of a quarter has a share of all rows' inputs.
template <>
struct Sums<Fp32> {
    float at[4], all[2][8] = {};

    __device__ __forceinline__ void add(uint4 upper, uint4 lower, const uint4* row, int k) {
        const float* high = reinterpret_cast<const float*>(&upper);
        const float* low = reinterpret_cast<const float*>(&lower);
#pragma unroll
        for (int r = 0; r < 8; ++r) {
            const uint4* from = reinterpret_cast<const uint4*>(
                __shfl_sync(~0u, reinterpret_cast<unsigned long long>(row), 4 * r)
            );
            if (from == nullptr) continue;
            uint4 bits = __ldg(from + k);
            const float* x = reinterpret_cast<const float*>(&bits);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                all[0][r] += high[i] * x[i];
                all[1][r] += low[i] * x[i];
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

// ``sums`` of 8 * TILES rows, of which ``tiles`` tiles are there, over the ``length`` vectors of 16 bytes of a row that
// are this part's of SPLIT. Rows are null where there are none.
template <class T, int SPLIT, int TILES>
__device__ __forceinline__ void stream(
    const uint4* upper, const uint4* lower, const uint4* const (&rows)[TILES], int tiles, int length, int part,
    Sums<T> (&sums)[TILES]
) {
    constexpr int UNROLL = sizeof(typename T::Element) == 2 ? 4 : 1, STEP = 8 * SPLIT;
    const uint4 none = make_uint4(0, 0, 0, 0);
    for (int base = 8 * part; base < length; base += UNROLL * STEP) {
        int first = base + threadIdx.x % 4;
        uint4 a[2 * UNROLL], b[2 * UNROLL];
#pragma unroll
        for (int u = 0; u < 2 * UNROLL; ++u) {
            int k = first + u / 2 * STEP + u % 2 * 4;
            a[u] = k < length ? load_once(upper + k) : none;
            b[u] = k < length ? load_once(lower + k) : none;
        }
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) {
            if (tile >= tiles) break;
#pragma unroll
            for (int u = 0; u < 2 * UNROLL; ++u) {
                int k = first + u / 2 * STEP + u % 2 * 4;
                if (base + u / 2 * STEP + u % 2 * 4 >= length) break;  // the same for all threads of the warp
                sums[tile].add(a[u], b[u], k < length ? rows[tile] : nullptr, k < length ? k : 0);
            }
        }
    }
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) sums[tile].finish();
}
