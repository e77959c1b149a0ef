// The matmul of some rows with a weight of 4 or 8 bits; reading the weight once bounds it.
#pragma once
#include "cluster.cuh"
#include "low_bit.cuh"

constexpr int MOST_SPLITS = 8;  // warps of a block along the inputs, and blocks of a cluster
constexpr int SUMS_PAD = 4;     // floats after a row of partial sums: rows of one store use different banks

// A thread's part of a chunk: numbers of all four groups of 32 inputs for one output of each of `HALVES` times 8, and
// what the format reads for them.
template <class Format, int HALVES>
struct LowBitChunk {
    uint4 numbers[HALVES][Format::LOADS];
    typename Format::Held held[HALVES];
};

// A thread's eight inputs of a group of 32: neighbours, or four in each half, so that a tensor core instruction has the
// inputs of one group of 16.
template <int GROUP>
__device__ __forceinline__ uint4 eight_inputs(const u16* x) {
    if constexpr (GROUP == 32) {
        return __ldg(reinterpret_cast<const uint4*>(x));
    } else {
        uint2 low = __ldg(reinterpret_cast<const uint2*>(x)), high = __ldg(reinterpret_cast<const uint2*>(x + 16));
        return make_uint4(low.x, low.y, high.x, high.y);
    }
}

// use(row, output) for every second output of every row.
template <class Use>
__device__ __forceinline__ void for_pairs(int rows, int outputs, int begin, int step, Use use) {
    int pairs = (outputs + 1) / 2;
    for (int i = begin; i < rows * pairs; i += step) use(i / pairs, 2 * (i % pairs));
}

// The sum of value(0) to value(count - 1), with a count of 1, 2, 4 or 8: in pairs, then pairs of pairs. So the sum is
// the same whether one block has all of them or several blocks have a few each.
template <class Value>
__device__ __forceinline__ float2 tree_sum(int count, Value value) {
    float2 sums[MOST_SPLITS];
#pragma unroll
    for (int i = 0; i < MOST_SPLITS; ++i) sums[i] = i < count ? value(i) : make_float2(0, 0);
#pragma unroll
    for (int step = 1; step < MOST_SPLITS; step *= 2)
#pragma unroll
        for (int i = 0; i < MOST_SPLITS; i += 2 * step) {
            sums[i].x += sums[i + step].x;
            sums[i].y += sums[i + step].y;
        }
    return sums[0];
}

// Grid (blocks of a cluster, outputs / (16 * TILES)), at most ROWS rows. The warps of a block and the blocks of a
// cluster share the inputs. Sums are of exact numbers, so no weight is rounded: either their scale is applied to the
// sum of a group, or numbers are exact with their scale. Rows and outputs that do not exist repeat the last ones.
template <class Format, int ROWS, int TILES>
__device__ void low_bit_matmul(const u16* x, const u8* weight, Format format, int rows, int width, int inner,
                               u16* out) {
    using T = typename Format::T;
    constexpr int LOADS = Format::LOADS, GROUPS = 4 / LOADS, BYTES = 64 * LOADS;  // groups of a load, bytes of a chunk
    constexpr int ROW_TILES = ROWS / 8, HALVES = 2 * TILES, OUTPUTS = 8 * HALVES, PITCH = OUTPUTS + SUMS_PAD;
    extern __shared__ float partial[];  // [warps][ROWS][PITCH]
    // broadcast, so that a warp branches as one
    int warp = __shfl_sync(ALL_LANES, threadIdx.x / 32, 0), warps = blockDim.x / 32;
    int lane = threadIdx.x % 32, line = lane / 4, part = lane % 4;
    int chunks = chunks_of(inner), stored = format.stored(inner);
    i64 base = static_cast<i64>(OUTPUTS) * blockIdx.y;
    int until = min(i64(OUTPUTS), width - base);
    weight += base * chunks * BYTES;
    format.advance(base, stored);
    int at[HALVES], scale_at[HALVES], x_at[ROW_TILES];
#pragma unroll
    for (int i = 0; i < HALVES; ++i) {
        int of = min(8 * i + line, until - 1);
        at[i] = of * chunks * BYTES + 16 * part;
        scale_at[i] = of * stored;
    }
#pragma unroll
    for (int t = 0; t < ROW_TILES; ++t) x_at[t] = min(8 * t + line, rows - 1) * inner + Format::GROUP / 4 * part;
    auto load = [&](int chunk) {
        LowBitChunk<Format, HALVES> found;
#pragma unroll
        for (int i = 0; i < HALVES; ++i) {
#pragma unroll
            for (int j = 0; j < LOADS; ++j) found.numbers[i][j] = load_once(weight + (at[i] + BYTES * chunk + 64 * j));
            found.held[i] = format.load(scale_at[i], chunk);
        }
        return found;
    };

    float sums[TILES][ROW_TILES][4] = {};
    auto multiply = [&](const LowBitChunk<Format, HALVES>& stored, int chunk) {
        decltype(format.select(stored.held[0], 0)) held[HALVES];
#pragma unroll
        for (int i = 0; i < HALVES; ++i) held[i] = format.select(stored.held[i], chunk);
#pragma unroll
        for (int group = 0; group < 4; ++group) {
            int k = CHUNK_INPUTS * chunk + 32 * group;
            if (k >= inner) break;
            u32 numbers[TILES][8];
#pragma unroll
            for (int i = 0; i < HALVES; ++i) {
                u32 operand = format.operand(held[i], chunk, group);
#pragma unroll
                for (int j = 0; j < 4; ++j)
                    numbers[i / 2][2 * j + i % 2] =
                        Format::pair(stored.numbers[i][group / GROUPS], group % GROUPS, j, operand);
            }
#pragma unroll
            for (int t = 0; t < ROW_TILES; ++t) {
                uint4 in = eight_inputs<Format::GROUP>(x + (x_at[t] + k));
                [[maybe_unused]] float of_inputs[4] = {};  // their sum, for each output
                if constexpr (Format::MINIMA) {
                    u32 one = T::pack(make_float2(1, 1));
                    const u32 ones[4] = {one, one, one, one};
                    T::mma(of_inputs, ones, in.x, in.y);
                    T::mma(of_inputs, ones, in.z, in.w);
                }
#pragma unroll
                for (int i = 0; i < TILES; ++i) {
                    const u32 first[4] = {numbers[i][0], numbers[i][1], numbers[i][2], numbers[i][3]};
                    const u32 second[4] = {numbers[i][4], numbers[i][5], numbers[i][6], numbers[i][7]};
                    if constexpr (Format::SCALES_NUMBERS) {
                        T::mma(sums[i][t], first, in.x, in.y);
                        T::mma(sums[i][t], second, in.z, in.w);
                    } else if constexpr (Format::GROUP == 16) {
                        float low[4] = {}, high[4] = {};
                        T::mma(low, first, in.x, in.y);
                        T::mma(high, second, in.z, in.w);
#pragma unroll
                        for (int j = 0; j < 4; ++j) {
                            auto& of = held[2 * i + j / 2];
                            sums[i][t][j] += Format::scale(of, 2 * group) * low[j];
                            sums[i][t][j] += Format::scale(of, 2 * group + 1) * high[j];
                        }
                    } else {
                        float sum[4] = {};
                        T::mma(sum, first, in.x, in.y);
                        T::mma(sum, second, in.z, in.w);
#pragma unroll
                        for (int j = 0; j < 4; ++j) {
                            auto& of = held[2 * i + j / 2];
                            sums[i][t][j] += Format::scale(of, group) * sum[j];
                            if constexpr (Format::MINIMA) sums[i][t][j] -= Format::minimum(of, group) * of_inputs[j];
                        }
                    }
                }
            }
        }
    };

    int stride = warps * cluster_size(), chunk = warps * cluster_rank() + warp;
    if (chunk < chunks) {
        LowBitChunk<Format, HALVES> next = load(chunk);
        for (; chunk < chunks; chunk += stride) {
            LowBitChunk<Format, HALVES> held = next;
            if (chunk + stride < chunks) next = load(chunk + stride);
            multiply(held, chunk);
        }
    }

#pragma unroll
    for (int t = 0; t < ROW_TILES; ++t)
#pragma unroll
        for (int i = 0; i < 4 * TILES; ++i) {
            int to = 8 * (i / 2) + line, r = 8 * t + 2 * part + i % 2;
            partial[(warp * ROWS + r) * PITCH + to] = sums[i / 4][t][i % 4];
        }
    __syncthreads();
    int thread = threadIdx.x, threads = blockDim.x;
    auto sum_warps = [&](int r, int o) {
        return tree_sum(warps, [&](int w) { return *reinterpret_cast<float2*>(partial + (w * ROWS + r) * PITCH + o); });
    };
    auto store = [&](int r, int o, float2 sum) {
        if constexpr (Format::SCALES_NUMBERS) sum = {sum.x * format.factor(o), sum.y * format.factor(o + 1)};
        T::store2(out + static_cast<i64>(r) * width + base + o, sum);
    };
    int shared_by = cluster_size();
    if (shared_by == 1) {
        for_pairs(rows, until, thread, threads, [&](int r, int o) { store(r, o, sum_warps(r, o)); });
        return;
    }
#if __CUDA_ARCH__ >= 900
    for_pairs(rows, until, thread, threads,
              [&](int r, int o) { *reinterpret_cast<float2*>(partial + r * PITCH + o) = sum_warps(r, o); });
    arrive_at_cluster();
    wait_for_cluster();
    u32 mine = static_cast<u32>(__cvta_generic_to_shared(partial));
    for_pairs(rows, until, thread + cluster_rank() * threads, threads * shared_by, [&](int r, int o) {
        u32 at = mine + 4 * (r * PITCH + o);
        store(r, o, tree_sum(shared_by, [&](int block) { return load_remote2(address_in(at, block)); }));
    });
    arrive_at_cluster();  // no block exits while others read its memory
    wait_for_cluster();
#endif
}
