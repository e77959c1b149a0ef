// Routing: the choices of every row, and its pairs (row, choice) sorted by expert.
#pragma once
#include "early.cuh"
#include "experts_elements.cuh"
#include "experts_stream.cuh"

constexpr int MAX_EXPERTS = 512, PER_LANE = MAX_EXPERTS / 32;

// One row per warp: the experts of its largest logits, the first of equal ones, and their weights. A NaN is chosen last
// and makes all weights of its row NaN, so it stays in that row. An expert's number in `factors`, if there are some,
// multiplies its weight. A shared expert, whose number is `experts`, is the row's last choice; the sigmoid of its
// logit, which follows those of the others, is its weight.
template <class T>
__device__ void choose(const typename T::Element* logits, int experts, int per_token, bool normalized, bool shared,
                       const typename T::Element* factors, int* ids, float* weights) {
    int lane = threadIdx.x % 32;
    float held[PER_LANE], largest = -INFINITE, total = 0, chosen = -INFINITE;
    u32 used = 0;
    bool odd = false;
#pragma unroll
    for (int j = 0; j < PER_LANE; ++j) {
        int at = lane + 32 * j;
        held[j] = -INFINITE;
        if (at >= experts) {
            used |= 1u << j;
            continue;
        }
        float x = load1<T>(logits + at);
        odd |= x != x;
        if (x == x) held[j] = x;
        largest = fmaxf(largest, held[j]);
    }
    for (int by = 16; by; by /= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, by));
    odd = __any_sync(~0u, odd);
    int mine = 0;
    for (int slot = 0; slot < per_token; ++slot) {
        u32 best = 0, at = ~0u;  // as unsigned integers in the order of the logits; none is 0
#pragma unroll
        for (int j = 0; j < PER_LANE; ++j) {
            if (32 * j >= experts) break;
            u32 bits = __float_as_uint(held[j]), key = bits ^ (u32(int(bits) >> 31) | 0x80000000u);
            if (!(used >> j & 1) && key > best) best = key, at = lane + 32 * j;
        }
        u32 most = __reduce_max_sync(~0u, best);
        u32 first = __reduce_min_sync(~0u, best == most ? at : ~0u);
        if (first % 32 == lane) used |= 1u << first / 32;
        if (slot == lane) {
            mine = first;
            chosen = __uint_as_float(most & 0x80000000u ? most ^ 0x80000000u : ~most);
        }
    }
    float weight = lane < per_token ? __expf(chosen - largest) : 0;
    if (normalized) {
        total = weight;
    } else {
#pragma unroll
        for (int j = 0; j < PER_LANE; ++j) total += __expf(held[j] - largest);
    }
    for (int by = 16; by; by /= 2) total += __shfl_xor_sync(~0u, total, by);
    if (lane < per_token) {
        ids[lane] = mine;
        float factor = factors ? load1<T>(factors + mine) : 1;
        weights[lane] = odd ? __int_as_float(0x7fffffff) : weight / total * factor;
    }
    if (shared && lane == 0) {
        ids[per_token] = experts;
        weights[per_token] = 1 / (1 + __expf(-load1<T>(logits + experts)));
    }
}

// The experts of pairs `first` to `first` + 3; -1 after the last pair. `first` is a multiple of 4.
__device__ __forceinline__ int4 four_ids(const int* ids, int first, int pairs) {
    if (first + 4 <= pairs) return *reinterpret_cast<const int4*>(ids + first);
    auto id = [&](int pair) { return pair < pairs ? ids[pair] : -1; };
    return make_int4(id(first), id(first + 1), id(first + 2), id(first + 3));
}

// Part of block e: the pairs of expert e in order and the place of each, ``ends``[e], and its items {expert, first
// place, pairs} of at most `most` pairs.
__device__ void place(const int* ids, int pairs, int experts, int most, int* order, int* places, int* ends, int4* items,
                      int* item_count) {
    __shared__ int counts[MAX_EXPERTS + 1], before[2], of_warp[32];
    int expert = blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
    for (int e = threadIdx.x; e < experts; e += blockDim.x) counts[e] = 0;
    __syncthreads();
    for (int p = 4 * threadIdx.x; p < pairs; p += 4 * blockDim.x) {
        int4 four = four_ids(ids, p, pairs);
        auto count_one = [&](int id) {
            if (id >= 0) atomicAdd(&counts[id], 1);
        };
        count_one(four.x), count_one(four.y), count_one(four.z), count_one(four.w);
    }
    __syncthreads();
    if (warp == 0) {
        int placed = 0, cut = 0;
        for (int e = lane; e < expert; e += 32) {
            placed += counts[e];
            cut += (counts[e] + most - 1) / most;
        }
        placed = __reduce_add_sync(~0u, placed);
        cut = __reduce_add_sync(~0u, cut);
        if (lane == 0) before[0] = placed, before[1] = cut;
    }
    __syncthreads();
    int count = counts[expert], start = before[0], own = (count + most - 1) / most;
    for (int i = threadIdx.x; i < own; i += blockDim.x) {
        items[before[1] + i] = make_int4(expert, start + i * most, min(most, count - i * most), 0);
    }
    if (threadIdx.x == 0) {
        ends[expert] = start + count;
        if (expert == experts - 1) *item_count = before[1] + own;
    }
    for (int base = 0, done = 0; done < count; base += 4 * blockDim.x) {
        int first = base + 4 * threadIdx.x;
        int4 four = four_ids(ids, first, pairs);
        bool own[4] = {four.x == expert, four.y == expert, four.z == expert, four.w == expert};
        int lower = 0, all = 0;  // of lower lanes, and of the warp
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            u32 same = __ballot_sync(~0u, own[i]);
            lower += __popc(same & ((1u << lane) - 1));
            all += __popc(same);
        }
        if (lane == 0) of_warp[warp] = all;
        __syncthreads();
        int other = lane < warps ? of_warp[lane] : 0;
        int at = start + done + __reduce_add_sync(~0u, lane < warp ? other : 0) + lower;
        done += __reduce_add_sync(~0u, other);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (!own[i]) continue;
            order[at] = first + i;
            places[first + i] = at++;
        }
        __syncthreads();
    }
}

constexpr int FEW_ROWS = 32, FEW_PAIRS = 1024;  // that one block routes

// All of the above for at most FEW_ROWS rows, by one block with a thread or more per expert. A bit per row says which
// rows chose an expert, so the bits of lower rows count the pairs before a row's.
template <class T>
__device__ void route_few(const typename T::Element* logits, int rows, int experts, int per_token, int normalized,
                          int shared_columns, const typename T::Element* factors, int most, float* weights, int* order,
                          int* places, int* ends, int4* items, int* item_count) {
    __shared__ int ids[FEW_PAIRS], starts[MAX_EXPERTS + 1];
    __shared__ u32 chosen_by[MAX_EXPERTS + 1], of_warp[32];
    int shared = shared_columns > 0, choices = per_token + shared, all = experts + shared, pairs = rows * choices;
    int expert = threadIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
    begin_next();
    if (expert < all) chosen_by[expert] = 0;
    wait_for_previous();
    __syncthreads();
    for (int row = warp; row < rows; row += warps) {
        int* of_row = ids + row * choices;
        choose<T>(logits + static_cast<i64>(row) * (experts + shared_columns), experts, per_token, normalized, shared,
                  factors, of_row, weights + row * choices);
        __syncwarp();
        for (int i = lane; i < choices; i += 32) atomicOr(&chosen_by[of_row[i]], 1u << row);
    }
    __syncthreads();
    int count = expert < all ? __popc(chosen_by[expert]) : 0, own = (count + most - 1) / most;
    u32 both = own << 16 | count, upto = both;  // items and pairs
#pragma unroll
    for (int by = 1; by < 32; by *= 2) {
        u32 lower = __shfl_up_sync(~0u, upto, by);
        if (lane >= by) upto += lower;
    }
    if (lane == 31) of_warp[warp] = upto;
    __syncthreads();
    upto += __reduce_add_sync(~0u, lane < warp ? of_warp[lane] : 0);
    if (expert < all) {
        int start = (upto - both) & 0xffff, item = (upto - both) >> 16;
        starts[expert] = start;
        ends[expert] = start + count;
        for (int i = 0; i < own; ++i)
            items[item + i] = make_int4(expert, start + i * most, min(most, count - i * most), 0);
        if (expert == all - 1) *item_count = item + own;
    }
    __syncthreads();
    for (int pair = threadIdx.x; pair < pairs; pair += blockDim.x) {
        int id = ids[pair], at = starts[id] + __popc(chosen_by[id] & ((1u << pair / choices) - 1));
        order[at] = pair;
        places[pair] = at;
    }
}
