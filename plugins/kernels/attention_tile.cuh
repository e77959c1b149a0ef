// One pass of attention over a range of keys: rows of queries packed into tensor core tiles, online softmax.
//
// The query heads that share a KV head, for all new tokens, are the rows of one matmul with its keys: row r is token r
// / group, head r % group. A block has four warps and ROWS = 16 * TILES rows. Warps that are left over split the keys
// of a tile, so that few rows keep all warps busy. Softmax follows FlashAttention-2, the split of the keys over blocks
// flash-decoding.
#pragma once

#include "attention_head.cuh"
#include "copy.cuh"

constexpr int KEYS = 64;  // per step; no cache block may end inside
constexpr int WARPS = 4;
constexpr int STAGES = 3;  // steps whose keys and values are in shared memory or being copied

// Width of a tile's row, in units of 16 bits.
template <class T, int D>
constexpr int WIDTH = D * sizeof(typename T::Cached) / 2;

// Offset, in units of 16 bits, of 16 bytes in a tile of KEYS rows: chunks are permuted so that eight rows fall into
// different banks. The permutation is a XOR, so chunk c + 2k of a row (c < 2) is at the address of chunk c with 32k
// flipped in it.
template <int WIDTH>
__device__ int swizzled(int row, int chunk) {
    constexpr int MASK = (WIDTH >= 64 ? 8 : WIDTH / 8) - 1, TOGETHER = WIDTH >= 64 ? 1 : 64 / WIDTH;
    return row * WIDTH + ((chunk ^ (row / TOGETHER & MASK)) * 8);
}

// The keys of a block. Positions below `stored` are in the cache, those up to `end` come from `qkv`.
struct Range {
    int first, stride, count;  // steps of KEYS positions: `count` of them, every `stride`th
    int begin, stored, end;

    __device__ int step(int i) const { return first + i * stride; }
    // The inverse of `step`, or -1 for a step of another block.
    __device__ int index(int step) const {
        int i = (step - first) / stride;
        return step >= first && i < count && first + i * stride == step ? i : -1;
    }
};

// A row of the block table. A warp holds the first 32 entries, one per lane, so reading one costs no memory access; all
// lanes of a warp read the same one.
struct Table {
    const int* row;
    int mine;

    __device__ Table(const int* row, int size) : row(row), mine(threadIdx.x % 32 < size ? row[threadIdx.x % 32] : 0) {}
    __device__ int operator[](int index) const {
        return index < 32 ? __shfl_sync(0xffffffffu, mine, index) : row[index];
    }
};

// Start the copies of one step, by a block of COPYING warps. Entries after the row's end become zeros; the places of
// new tokens are left alone. SMALL: in less code.
template <class T, int D, int COPYING = WARPS, bool SMALL = false>
__device__ void fetch(const Operands<T>& x, u16* keys, Range range, int step, int block, int kv_head) {
    constexpr int W = WIDTH<T, D>, CHUNKS = W / 8, VALUES = KEYS * W;  // values follow the keys
    int first = step * KEYS;
    constexpr int LINES = 32 * COPYING / CHUNKS;  // lines that the block copies at a time
    constexpr int FLIPPED = LINES % 8 * 16;       // in the addresses of every second time, by `swizzled`
    i64 base = x.entry(block, kv_head, first) * D;
    u32 tile = shared_address(keys + swizzled<W>(threadIdx.x / CHUNKS, threadIdx.x % CHUNKS));
    i64 from = base + threadIdx.x * (D / CHUNKS);
#pragma unroll(SMALL ? 2 : KEYS / LINES)
    for (int i = 0; i < KEYS / LINES; ++i) {
        int position = first + threadIdx.x / CHUNKS + i * LINES;
        bool cached = position >= range.begin && position < range.stored;
        if (position >= range.stored && position < range.end) continue;
        u32 to = tile ^ i % 2 * FLIPPED;
        copy16(to + i * LINES * W * 2, x.key_cache + from + i * LINES * D, cached);
        copy16(to + (VALUES + i * LINES * W) * 2, x.value_cache + from + i * LINES * D, cached);
    }
}

// State of a warp's 16 rows: a thread has rows lane / 4 and lane / 4 + 8 of everything, and the columns of `sum` that
// T::add_values leaves there.
template <int D>
struct Rows {
    float sum[D / 8][4] = {};
    float largest[2] = {-INFINITE, -INFINITE};  // of the scores, in units of log 2
    float weights[2] = {};
};

// The sinks of a warp's rows, as a key with a weight and no value that the rows have seen: of the first of the warps,
// and of the blocks, that share the rows.
template <class T, int C>
__device__ void see_sinks(Rows<C>& rows, const Operands<T>& x, int kv_head, int packed, bool first) {
    if (!x.sinks || !first) return;
    int lane = threadIdx.x % 32, group = x.heads / x.kv_heads;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        int head = kv_head * group + (packed + lane / 4 + 8 * half) % group;
        rows.largest[half] = x.sinks[head] * LOG2_E;
        rows.weights[half] = lane % 4 == 0 ? 1 : 0;
    }
}

// How many positions after its own a token sees: none.
struct Causal {
    __device__ int later(int, int) const { return 0; }
    __device__ Causal of_run(int, int) const { return {}; }
};

// The rest of the image that it belongs to; `ends` [tokens]: the position after it, or 0.
struct WithinImages {
    const i64* ends;
    int tokens;

    __device__ int later(int token, int position) const {
        return token < tokens ? max(static_cast<int>(ends[token]) - 1 - position, 0) : 0;
    }
    __device__ WithinImages of_run(int first, int count) const { return {ends + first, count}; }
};

// Visibility for the rows of a warp of keys that begin at `position`.
struct Mask {
    bool needed;
    int position, reach;  // a row sees the keys less than `reach` before its own, itself included
    int start, packed, group;

    __device__ int token(int line) const { return (packed + line) / group; }
    __device__ int seen(int line) const { return start + (packed + line) / group; }
};

// The rows of a warp that shares a row tile with `count` - 1 others: it computes the scores of as many keys, and has
// every `count`th group of the columns of a value. Scores go through `scores` [rows][SPAN + 8].
template <int COUNT>
struct Helper {
    float* scores;
    int number;
};
template <>
struct Helper<1> {
    static constexpr int number = 0;
};

// Columns of a value that one instruction adds, and those of one of HELPERS warps.
template <class T, int D>
constexpr int COLUMNS = 16 * D / WIDTH<T, D>;
template <class T, int D, int C, int HELPERS>
constexpr int HELPER_COLUMNS = (C / COLUMNS<T, D> + HELPERS - 1) / HELPERS * COLUMNS<T, D>;

// Scores of SPAN keys: the warp's own ones, then all, by way of shared memory. All warps of a block call it.
template <int SPAN, int HELPERS>
__device__ void exchange(float (&score)[SPAN / 8][4], const float (&own)[SPAN / HELPERS / 8][4],
                         Helper<HELPERS> helper) {
    int lane = threadIdx.x % 32;
    float* at = helper.scores + lane / 4 * (SPAN + 8) + 2 * (lane % 4);
#pragma unroll
    for (int n = 0; n < SPAN / HELPERS / 8; ++n)
#pragma unroll
        for (int half = 0; half < 2; ++half)
            *reinterpret_cast<float2*>(at + half * 8 * (SPAN + 8) + helper.number * (SPAN / HELPERS) + 8 * n) =
                make_float2(own[n][2 * half], own[n][2 * half + 1]);
    __syncthreads();
#pragma unroll
    for (int n = 0; n < SPAN / 8; ++n)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float2 two = *reinterpret_cast<const float2*>(at + half * 8 * (SPAN + 8) + 8 * n);
            score[n][2 * half] = two.x;
            score[n][2 * half + 1] = two.y;
        }
}

// Scores, softmax and sum over the SPAN keys of this warp in a step that is in shared memory. If the warps of a row
// tile have V of the D columns of a value, these are part `part` of them; a helper has C of these. All of it has the
// same bits with any number of helpers.
template <class T, int D, int SPAN, int V, int HELPERS = 1, class Images = Causal, int C>
__device__ void accumulate(Rows<C>& rows, const u32 (&q)[D / 16][4], const u16* keys, int line, Mask mask, int part = 0,
                           Images images = {}, Helper<HELPERS> helper = {}) {
    constexpr int W = WIDTH<T, D>, OF_PART = W * V / D / 16, OWN = SPAN / HELPERS;
    int lane = threadIdx.x % 32, own = line + helper.number * OWN;
    float score[SPAN / 8][4] = {}, scored[OWN / 8][4] = {};
    u32 fragment[4];
    u32 key_at = shared_address(keys + swizzled<W>(own + lane / 16 * 8 + lane % 8, lane / 8 % 2));
    u32 value_at = shared_address(keys + KEYS * W + swizzled<W>(line + lane % 16, lane / 16)) ^ 32 * OF_PART * part;
#pragma unroll
    for (int k = 0; k < W / 16; ++k)
#pragma unroll
        for (int n = 0; n < OWN / 16; ++n) {
            load_matrices(fragment, (key_at ^ 32 * k) + 16 * n * W * 2);
            T::score(scored[2 * n], scored[2 * n + 1], q, k, fragment);
        }
    if constexpr (HELPERS > 1) {
        exchange<SPAN, HELPERS>(score, scored, helper);
    } else {
#pragma unroll
        for (int n = 0; n < SPAN / 8; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) score[n][i] = scored[n][i];
    }
    if (mask.needed) {
        const int seen[2] = {mask.seen(lane / 4), mask.seen(lane / 4 + 8)};
        const int later[2] = {images.later(mask.token(lane / 4), seen[0]),
                              images.later(mask.token(lane / 4 + 8), seen[1])};
#pragma unroll
        for (int n = 0; n < SPAN / 8; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                int distance = seen[i / 2] - (mask.position + 8 * n + 2 * (lane % 4) + i % 2);
                if (distance < -later[i / 2] || distance >= mask.reach) score[n][i] = -INFINITE;
            }
    }
    float top[2] = {rows.largest[0], rows.largest[1]};
#pragma unroll
    for (int n = 0; n < SPAN / 8; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) top[i / 2] = fmaxf(top[i / 2], score[n][i]);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        top[half] = fmaxf(top[half], __shfl_xor_sync(0xffffffffu, top[half], 1));
        top[half] = fmaxf(top[half], __shfl_xor_sync(0xffffffffu, top[half], 2));
        float base = top[half] == -INFINITE ? 0 : top[half], keep = exp2f(rows.largest[half] - base);
        rows.largest[half] = top[half];
        top[half] = base;
        rows.weights[half] = __fmul_rn(rows.weights[half], keep);  // with or without helpers one rounding of its own
#pragma unroll
        for (int n = 0; n < C / 8; ++n) {
            rows.sum[n][2 * half] *= keep;
            rows.sum[n][2 * half + 1] *= keep;
        }
    }
#pragma unroll
    for (int n = 0; n < SPAN / 8; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            score[n][i] = exp2f(score[n][i] - top[i / 2]);
            rows.weights[i / 2] += score[n][i];
        }
#pragma unroll
    for (int n = 0; n < SPAN / 16; ++n) {
        using Tile = typename T::Tile;
        const u32 weight[4] = {Tile::pack(make_float2(score[2 * n][0], score[2 * n][1])),
                               Tile::pack(make_float2(score[2 * n][2], score[2 * n][3])),
                               Tile::pack(make_float2(score[2 * n + 1][0], score[2 * n + 1][1])),
                               Tile::pack(make_float2(score[2 * n + 1][2], score[2 * n + 1][3]))};
#pragma unroll
        for (int i = 0; i < C / COLUMNS<T, D>; ++i) {
            int d = i * HELPERS + helper.number;
            if (HELPERS > 1 && d >= OF_PART) break;
            load_transposed(fragment, (value_at ^ 32 * d) + 16 * n * W * 2);
            T::add_values(rows.sum, weight, i, fragment);
        }
    }
}
