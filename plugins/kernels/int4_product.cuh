// The product of some rows with a weight of 4 bits: bound by reading the weight, once.
#pragma once
#include "cluster.cuh"
#include "int4.cuh"

constexpr int INT4_PAD = 4;      // floats behind a row of partial sums: rows of one store lie in banks of their own

// What a warp holds of a chunk for `TILES` times 16 outputs, in two halves of 8, each thread of one output: numbers of
// all four groups of 32 inputs, and their scales as they are stored.
template <int TILES>
struct Int4Chunk {
    uint4 numbers[TILES][2];
    uint2 scales[TILES][2];
};

// use(row, output) for every second output of every row.
template <class Use>
__device__ __forceinline__ void for_pairs(int rows, int outputs, int begin, int step, Use use) {
    int pairs = (outputs + 1) / 2;
    for (int i = begin; i < rows * pairs; i += step) use(i / pairs, 2 * (i % pairs));
}

// Blocks of a cluster and the threads along x share the inputs, those along y have other outputs. The sums of a group of
// inputs are exact but for their last bits, and each group's scale is applied to its sum, so no weight is rounded.
template <class T, int ROWS, int TILES, bool ZEROS>
__device__ void int4_product(
    const u16* x, const u8* weight, const u16* scales, const u8* zeros, int rows, int width, int inner, int shift,
    u16* product
) {
    constexpr int ROW_TILES = ROWS / 8, OUTPUTS = 16 * TILES;
    extern __shared__ float partial[];  // [warps along the inputs][ROWS][outputs of the block + INT4_PAD]
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, line = lane / 4, part = lane % 4, warps = blockDim.x / 32;
    int outputs = OUTPUTS * blockDim.y, chunks = (inner + INT4_CHUNK - 1) / INT4_CHUNK;
    i64 base = static_cast<i64>(outputs) * blockIdx.y;
    int row = ROWS * blockIdx.z, blocks = chunks * 4 >> shift;
    weight += base * chunks * 64;
    scales += base * blocks;
    if (ZEROS) zeros += base * ((blocks + 1) / 2);
    x += static_cast<i64>(row) * inner;
    int last = width - 1 - base;
    auto output = [&](int tile, int half) { return min(OUTPUTS * int(threadIdx.y) + 16 * tile + 8 * half + line, last); };
    auto load = [&](int chunk) {
        Int4Chunk<TILES> found;
#pragma unroll
        for (int i = 0; i < 2 * TILES; ++i) {
            int of = output(i / 2, i % 2);
            found.numbers[i / 2][i % 2] = load_once(weight + (static_cast<i64>(of) * chunks + chunk) * 64 + 16 * part);
            found.scales[i / 2][i % 2] = load_scales(scales + static_cast<i64>(of) * blocks, chunk, shift);
        }
        return found;
    };

    float sums[TILES][ROW_TILES][4] = {};
    auto multiply = [&](const Int4Chunk<TILES>& held, int chunk) {
        uint2 scales[TILES][2];
        u32 middles[TILES][2];
#pragma unroll
        for (int i = 0; i < 2 * TILES; ++i) {
            scales[i / 2][i % 2] = spread_scales(held.scales[i / 2][i % 2], shift);
            if (ZEROS) middles[i / 2][i % 2] = load_zeros(zeros + static_cast<i64>(output(i / 2, i % 2)) * ((blocks + 1) / 2), chunk, shift);
        }
        constexpr u32 minus = ZEROS ? Nibbles<T>::MINUS_ONE : Nibbles<T>::MINUS_MIDDLE;
        const u32 all[4] = {minus, minus, minus, minus};
#pragma unroll
        for (int group = 0; group < 4; ++group) {
            int k = INT4_CHUNK * chunk + 32 * group + 8 * part;
#pragma unroll
            for (int t = 0; t < ROW_TILES; ++t) {
                int r = 8 * t + line;
                uint4 in = make_uint4(0, 0, 0, 0);
                if (row + r < rows && k < inner) in = *reinterpret_cast<const uint4*>(x + static_cast<i64>(r) * inner + k);
                in = in_pairs(in);
                float offsets[4] = {};
                T::product(offsets, all, in.x, in.y);
                T::product(offsets, all, in.z, in.w);
#pragma unroll
                for (int i = 0; i < TILES; ++i) {
                    u32 upper = word(held.numbers[i][0], group), lower = word(held.numbers[i][1], group);
                    float sum[4] = {offsets[0], offsets[1], offsets[2], offsets[3]};
                    if (ZEROS) {
                        float upper_middle = Nibbles<T>::number(middles[i][0] >> (4 * group) & 15);
                        float lower_middle = Nibbles<T>::number(middles[i][1] >> (4 * group) & 15);
                        sum[0] *= upper_middle;
                        sum[1] *= upper_middle;
                        sum[2] *= lower_middle;
                        sum[3] *= lower_middle;
                    }
                    const u32 first[4] = {Nibbles<T>::pair(upper, 0), Nibbles<T>::pair(lower, 0),
                                          Nibbles<T>::pair(upper, 1), Nibbles<T>::pair(lower, 1)};
                    const u32 second[4] = {Nibbles<T>::pair(upper, 2), Nibbles<T>::pair(lower, 2),
                                           Nibbles<T>::pair(upper, 3), Nibbles<T>::pair(lower, 3)};
                    T::product(sum, first, in.x, in.y);
                    T::product(sum, second, in.z, in.w);
#pragma unroll
                    for (int j = 0; j < 4; ++j) sums[i][t][j] += scale_of<T>(scales[i][j / 2], group) * sum[j];
                }
            }
        }
    };

    int stride = warps * cluster_size(), chunk = warps * cluster_rank() + warp;
    if (chunk < chunks) {
        Int4Chunk<TILES> next = load(chunk);
        for (; chunk < chunks; chunk += stride) {
            Int4Chunk<TILES> held = next;
            if (chunk + stride < chunks) next = load(chunk + stride);
            multiply(held, chunk);
        }
    }

    int pitch = outputs + INT4_PAD;
#pragma unroll
    for (int t = 0; t < ROW_TILES; ++t)
#pragma unroll
        for (int i = 0; i < 4 * TILES; ++i) {
            int to = OUTPUTS * threadIdx.y + 16 * (i / 4) + 8 * (i % 4 / 2) + line, r = 8 * t + 2 * part + i % 2;
            partial[(warp * ROWS + r) * pitch + to] = sums[i / 4][t][i % 4];
        }
    __syncthreads();
    int thread = threadIdx.y * blockDim.x + threadIdx.x, threads = blockDim.x * blockDim.y;
    int there = min(ROWS, rows - row), until = min(i64(outputs), width - base);
    auto sum_warps = [&](int r, int o) {
        float2 sum = make_float2(0, 0);
        for (int w = 0; w < warps; ++w) {
            float2 more = *reinterpret_cast<float2*>(partial + (w * ROWS + r) * pitch + o);
            sum.x += more.x;
            sum.y += more.y;
        }
        return sum;
    };
    auto store = [&](int r, int o, float2 sum) { T::store2(product + static_cast<i64>(row + r) * width + base + o, sum); };
    int shared_by = cluster_size();
    if (shared_by == 1) {
        for_pairs(there, until, thread, threads, [&](int r, int o) { store(r, o, sum_warps(r, o)); });
        return;
    }
#if __CUDA_ARCH__ >= 900
    for_pairs(there, until, thread, threads, [&](int r, int o) {
        *reinterpret_cast<float2*>(partial + r * pitch + o) = sum_warps(r, o);
    });
    arrive_at_cluster();
    wait_for_cluster();
    u32 mine = static_cast<u32>(__cvta_generic_to_shared(partial));
    for_pairs(there, until, thread + cluster_rank() * threads, threads * shared_by, [&](int r, int o) {
        float2 sum = make_float2(0, 0);
        for (int block = 0; block < shared_by; ++block) {
            float2 more = load_remote2(address_in(mine + 4 * (r * pitch + o), block));
            sum.x += more.x;
            sum.y += more.y;
        }
        store(r, o, sum);
    });
    arrive_at_cluster();  // nobody leaves while others read
    wait_for_cluster();
#endif
}
