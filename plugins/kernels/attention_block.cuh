// Work of one thread block: its share of the keys of a row tile, then the sum over all blocks that share them.
#pragma once

#include "attention_cluster.cuh"
#include "attention_new.cuh"
#include "attention_queries.cuh"

// The row tile of a block: tile `index` of `row`, and the `number`th of `all` tiles of the launch for a KV head.
struct Tile { int row, index, number, all; };

// `queries` loads the queries of a warp in two halves, first the part that depends on no position
// (attention_queries.cuh). `images`: what a token sees after its own position.
template <class T, int D, int TILES, class Queries, class Images = Causal>
__device__ void attend(const Operands<T>& x, Queries queries, Tile at, int splits, bool append,
                       typename T::Element* mixed, Parts parts, Images images = {}) {
    constexpr int ROWS = 16 * TILES, SPAN = KEYS * TILES / WARPS, STAGE = 2 * KEYS * WIDTH<T, D>;
    extern __shared__ __align__(1024) unsigned char memory[];
    __shared__ float2 bounds[ROWS];
    u16* stages = reinterpret_cast<u16*>(memory);

    int row = at.row, tile = at.index, split = blockIdx.x % splits;
    int kv_head = blockIdx.y, group = x.heads / x.kv_heads;
    int lines = min(ROWS, x.query * group - tile * ROWS);
    int warp = threadIdx.x / 32, packed = tile * ROWS + warp % TILES * 16;

    Table table(x.block_table + static_cast<i64>(row) * x.max_blocks, x.max_blocks);
    u32 q[D / 16][4];
    queries.load(q, x, row, kv_head, packed);
    int start = static_cast<int>(x.write_index[row]);

    Range range;
    int first_seen = start + tile * ROWS / group, last_seen = start + (tile * ROWS + lines - 1) / group;
    int reach = x.sliding_window ? x.sliding_window : 0x7fffffff;
    range.begin = max(0, first_seen - reach + 1);
    range.end = x.bounded(last_seen + images.later(last_seen - start, last_seen) + 1);
    range.stored = append ? start : range.end;
    // A block takes every `splits`th step, counted from the beginning of the text. So the terms and the order of a
    // row's sum depend on its position alone, and not on the number of tokens after it in its window.
    int skipped = range.begin / KEYS, end = (range.end + KEYS - 1) / KEYS;
    range.first = skipped + (split + splits - skipped % splits) % splits;
    range.stride = splits;
    range.count = max(0, (end - range.first + splits - 1) / splits);
    bool clustered = cluster_size() > 1;

    int block = range.count ? table[range.step(0) * KEYS / x.block_size] : 0;
    auto fetch_step = [&](int i) {
        if (i < range.count) {
            fetch<T, D>(x, stages + i % STAGES * STAGE, range, range.step(i), block, kv_head);
            if (i + 1 < range.count) block = table[range.step(i + 1) * KEYS / x.block_size];
        }
        close_copies();
    };
#pragma unroll 1
    for (int i = 0; i < STAGES; ++i) fetch_step(i);
    NewTokens<T, D> fresh;
    bool adds = append && range.count && (range.step(range.count - 1) + 1) * KEYS > range.stored;
    if (adds) fresh.load(x, 0, start, row, kv_head);
    queries.prepare(q, x, packed, start);

    int append_step = max(0, range.count - (STAGES - 1));  // from here on all new keys have their place in memory
    Rows<D> rows;
    see_sinks<T, D>(rows, x, kv_head, packed, split == 0 && warp < TILES);
    for (int i = 0; i < range.count; ++i) {
        if (adds && i == append_step) {
            fresh.place(x, stages, range, table, kv_head);
            for (int token = fresh.ALL; token < x.query; token += fresh.ALL) {
                fresh.load(x, token, start, row, kv_head);
                fresh.place(x, stages, range, table, kv_head);
            }
        }
        if (i == 0) {
            wait_copies<STAGES - 1>();
        } else {
            wait_copies<STAGES - 2>();
        }
        __syncthreads();
        if (i > 0) fetch_step(i + STAGES - 1);
        const u16* keys = stages + i % STAGES * STAGE;
        int line = warp / TILES * SPAN, position = range.step(i) * KEYS;
        bool masked = position + KEYS - 1 > first_seen || last_seen - position >= reach;
        Mask mask{masked, position + line, reach, start, packed, group};
        accumulate<T, D, SPAN, D>(rows, q, keys, line, mask, 0, images);
    }

    float* sums = reinterpret_cast<float*>(memory);
    share_rows<T, D, TILES>(rows, sums, bounds);
    auto write = [&](int line, int column, float4 value) {
        int token = (tile * ROWS + line) / group, head = kv_head * group + (tile * ROWS + line) % group;
        auto* to = mixed + (static_cast<i64>(row * x.query + token) * x.heads + head) * D + column;
        if constexpr (T::FLOAT8) value = scaled(value, x.value_scale);
        T::store2(to, make_float2(value.x, value.y));
        T::store2(to + 2, make_float2(value.z, value.w));
    };
    int ticket = (row * x.kv_heads + kv_head) * at.all + at.number;
    i64 part = static_cast<i64>(ticket) * splits * ROWS, mine = part + split * ROWS;
    float* row_sums = clustered ? sums + WARPS * 16 * (D + 8) : parts.sums + mine * D;
    constexpr int UNITS = 4;  // at a time, so that stores do not wait for one another
    for (int first = threadIdx.x; first < lines * (D / 4); first += UNITS * 32 * WARPS) {
        float4 sum[UNITS];
#pragma unroll
        for (int u = 0; u < UNITS; ++u) {
            int unit = min(first + u * 32 * WARPS, lines * (D / 4) - 1), line = unit / (D / 4);
            sum[u] = sum_of<D, TILES>(sums, line, unit % (D / 4) * 4);
            if (splits == 1) sum[u] = scaled(sum[u], 1 / bounds[line].y);
        }
#pragma unroll
        for (int u = 0; u < UNITS; ++u) {
            int unit = first + u * 32 * WARPS;
            if (unit >= lines * (D / 4)) break;
            if (splits == 1) {
                write(unit / (D / 4), unit % (D / 4) * 4, sum[u]);
            } else {
                *reinterpret_cast<float4*>(row_sums + unit * 4) = sum[u];
            }
        }
    }
    if (splits > 1 && !clustered && threadIdx.x < lines) parts.bounds[mine + threadIdx.x] = bounds[threadIdx.x];
    if (clustered) {
        sum_cluster<D>(row_sums, bounds, split, splits, lines, write);
    } else if (splits > 1 && is_last(parts.tickets + ticket, splits)) {
        float* shares = reinterpret_cast<float*>(memory);
        share_of_splits<ROWS>(shares, parts.bounds + part, splits, lines);
        sum_splits<D, ROWS>(parts.sums + part * D, shares, splits, lines, write);
    }
}

// Windows: grid (splits * row tiles, kv_heads, batch).
template <class T, int D, int TILES>
__device__ void attend_windows(const Operands<T>& x, int splits, bool append, typename T::Element* mixed, Parts parts) {
    // Row tiles in reverse: those with the most keys start first.
    int row_tiles = gridDim.x / splits, tile = row_tiles - 1 - blockIdx.x / splits;
    Tile at = {static_cast<int>(blockIdx.z), tile, tile, row_tiles};
    attend<T, D, TILES>(x, ProjectedQueries<T, D>{}, at, splits, append, mixed, parts);
}
