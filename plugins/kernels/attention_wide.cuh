// Attention of heads of 512 values, whose rows are too wide for the registers of one warp (wide_tile.cuh).
//
// Keys and values of all new tokens are in the cache. Step s of the keys of a text belongs to class s % CLASSES. The
// sum of a class depends on positions alone, and the classes are added in their order. One block may have all classes,
// or every class its own block: the operations are the same, and so are the bits.
#pragma once

#include "attention_fixed.cuh"
#include "attention_prompts.cuh"
#include "wide_tile.cuh"

constexpr int WIDE_CLASSES = 8;  // of windows; the keys of a prompt are one class

// Start the copies of a step's keys, or of its values, into a buffer. Places of other positions become zeros.
template <class T, int D>
__device__ void fetch_wide(const Operands<T>& x, const u16* cache, int row, int kv_head, int step, int begin, int end,
                           u16* buffer) {
    constexpr int CHUNKS = D / 8, LINES = 32 * WIDE_WARPS / CHUNKS;  // chunks of a line; lines at a time
    int first = step * WIDE_KEYS, chunk = threadIdx.x % CHUNKS;
    const u16* from = cache + x.entry(x.block_of(row, first), kv_head, first) * D + 8 * chunk;
#pragma unroll 4
    for (int line = threadIdx.x / CHUNKS; line < WIDE_KEYS; line += LINES) {
        bool there = first + line >= begin && first + line < end;
        copy16(shared_address(buffer + chunk_at<D>(line, chunk)), from + (there ? line * D : 0), there);
    }
}

// Add the sum of a class to those of earlier classes, and begin the next one.
template <int TILES, int COLUMNS>
__device__ void end_class(WideSums<TILES, COLUMNS>& all, WideSums<TILES, COLUMNS>& sums) {
#pragma unroll
    for (int m = 0; m < TILES; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float2 bound = make_float2(all.largest[m][half], all.total[2 * half]);
            Shares by(bound, make_float2(sums.largest[m][half], sums.total[2 * half]));
            all.largest[m][half] = bound.x;
            if (threadIdx.x / 32 == m) all.total[2 * half] = bound.y;
#pragma unroll
            for (int n = 0; n < COLUMNS / 8; ++n)
#pragma unroll
                for (int i = 2 * half; i < 2 * half + 2; ++i)
                    all.sum[m][n][i] = fixed_sum(all.sum[m][n][i], by.mine, sums.sum[m][n][i], by.other);
        }
    sums = WideSums<TILES, COLUMNS>();
}

// Write the rows of a block whose sums are complete, or its part of them.
template <class T, int D, int TILES, int COLUMNS, class Write>
__device__ void finish_wide(const WideSums<TILES, COLUMNS>& sums, float* totals, int lines, int ticket, int split,
                            int splits, Parts parts, Write write) {
    constexpr int ROWS = WideTile<TILES>::ROWS;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    i64 part = static_cast<i64>(ticket) * splits * ROWS, mine = part + split * ROWS;
#pragma unroll
    for (int m = 0; m < TILES; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            int line = 16 * m + lane / 4 + 8 * half;
            if (warp != m || lane % 4) continue;
            totals[line] = sums.total[2 * half];
            if (splits > 1) parts.bounds[mine + line] = make_float2(sums.largest[m][half], sums.total[2 * half]);
        }
    __syncthreads();
#pragma unroll
    for (int m = 0; m < TILES; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            int line = 16 * m + lane / 4 + 8 * half;
            if (line >= lines) continue;
            float by = splits > 1 ? 1 : __frcp_rn(totals[line]);
#pragma unroll
            for (int n = 0; n < COLUMNS / 8; ++n) {
                int column = warp * COLUMNS + 8 * n + 2 * (lane % 4);
                float2 value = make_float2(sums.sum[m][n][2 * half] * by, sums.sum[m][n][2 * half + 1] * by);
                if (splits > 1) {
                    *reinterpret_cast<float2*>(parts.sums + (mine + line) * D + column) = value;
                } else {
                    write(line, column, value);
                }
            }
        }
    if (splits == 1 || !is_last(parts.tickets + ticket, splits)) return;
    for (int unit = threadIdx.x; unit < lines * (D / 4); unit += 32 * WIDE_WARPS) {
        int line = unit / (D / 4), column = unit % (D / 4) * 4;
        Columns all;
#pragma unroll
        for (int i = 0; i < WIDE_CLASSES; ++i) {
            i64 at = part + i * ROWS + line;
            all.add({__ldcg(parts.bounds + at), __ldcg(reinterpret_cast<const float4*>(parts.sums + at * D + column))});
        }
        float4 value = scaled(all.sum, __frcp_rn(all.bound.y));
        write(line, column, make_float2(value.x, value.y));
        write(line, column + 2, make_float2(value.z, value.w));
    }
}

// A row tile; load(token, head) gives a query times the scale of the scores, in units of log 2. `splits`: 1 or CLASSES.
template <class T, int D, int TILES, int CLASSES, class Load>
__device__ void attend_wide(const Operands<T>& x, Tile at, int splits, int buffers, Load load,
                            typename T::Element* mixed, Parts parts) {
    using Of = WideTile<TILES>;
    constexpr int COLUMNS = D / WIDE_WARPS;
    extern __shared__ __align__(1024) unsigned char memory[];
    WideMemory<D, TILES> shared(memory, buffers);
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, split = blockIdx.x % splits;
    int kv_head = blockIdx.y, group = x.heads / x.kv_heads;
    int first = at.index * Of::ROWS, lines = min(Of::ROWS, x.query * group - first);
    int start = static_cast<int>(x.write_index[at.row]);
    auto position = [&](int line) { return start + (first + line) / group; };
    auto head = [&](int line) { return kv_head * group + (first + line) % group; };
    int reach = x.sliding_window ? x.sliding_window : 0x7fffffff;
    int begin = max(0, position(0) - reach + 1), end = x.bounded(position(lines - 1) + 1);

    ClassSteps next(begin / WIDE_KEYS, (end + WIDE_KEYS - 1) / WIDE_KEYS, CLASSES, split * (CLASSES / splits),
                    CLASSES / splits);
    ClassSteps fetched = next;
    bool values_next = false;
    int filled = 0, read = 0;  // the next buffers of both kinds
    auto fetch = [&] {
        if (fetched.there()) {
            const u16* cache = values_next ? x.value_cache : x.key_cache;
            u16* to = shared.ring + filled * WIDE_KEYS * D;
            fetch_wide<T, D>(x, cache, at.row, kv_head, fetched.step, begin, end, to);
            if (values_next) fetched.next();
            values_next = !values_next;
        }
        close_copies();
        filled = filled + 1 == buffers ? 0 : filled + 1;
    };
    // Wait for the oldest buffer that was not read yet, and for all warps; then start to fill the one before it.
    auto arrived = [&] {
        if (buffers == 1) {
            __syncthreads();  // all warps have read it
            fetch();
        }
        if (buffers > 2) {
            wait_copies<1>();
        } else {
            wait_copies<0>();
        }
        __syncthreads();
        if (buffers > 1) fetch();
        const u16* buffer = shared.ring + read * WIDE_KEYS * D;
        read = read + 1 == buffers ? 0 : read + 1;
        return buffer;
    };
    for (int i = 1; i < buffers; ++i) fetch();
    for (int line = warp; line < Of::ROWS; line += WIDE_WARPS) {
        Head<D> query = {};
        if (line < lines) query = load((first + line) / group, head(line));
        u16* to = shared.queries;
        write_pairs(query, [&](int i, float2 pair) { T::store2(to + chunk_at<D>(line, i / 8) + i % 8, pair); });
    }

    int line = warp % TILES * 16, keys = warp / TILES * Of::SPAN;
    const int seen[2] = {position(line + lane / 4), position(line + lane / 4 + 8)};
    float largest[2] = {-INFINITE, -INFINITE};
    WideSums<TILES, COLUMNS> sums, all;
    if (x.sinks && split == 0) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
#pragma unroll
            for (int m = 0; m < TILES; ++m) all.largest[m][half] = x.sinks[head(16 * m + lane / 4 + 8 * half)] * LOG2_E;
            all.total[2 * half] = 1;
        }
    }
    while (next.there()) {
        WideScores<T, TILES> scores;
        score_keys<T, D, Of::SPAN>(scores.score, shared.queries, arrived(), line, keys);
        auto sees = [&](int half, int key) { return key <= seen[half] && seen[half] - key < reach; };
        scores.mask(next.step * WIDE_KEYS + keys, sees, 1);
        scores.share_tops(shared.tops, line, warp / TILES);
        __syncthreads();
        scores.share_weights(shared.weights, shared.tops, largest, line, warp / TILES);
        sums.raise(shared.tops);
        const u16* values = arrived();
        sums.template add<T, D>(shared.weights, values, 0);
        int of_class = next.of_class;
        next.next();
        if (CLASSES == 1 || (next.there() && next.of_class == of_class)) continue;
        end_class(all, sums);
        largest[0] = largest[1] = -INFINITE;
    }
    if (CLASSES == 1) end_class(all, sums);
    wait_copies<0>();

    auto write = [&](int line, int column, float2 value) {
        i64 token = static_cast<i64>(at.row) * x.query + (first + line) / group;
        T::store2(mixed + (token * x.heads + head(line)) * D + column, value);
    };
    int ticket = (at.row * x.kv_heads + kv_head) * at.all + at.number;
    finish_wide<T, D>(all, shared.totals, lines, ticket, split, splits, parts, write);
}

// Windows: grid (splits * row tiles, kv_heads, batch).
template <class T, int D, int TILES>
__device__ void attend_windows_wide(const Operands<T>& x, int splits, int buffers, typename T::Element* mixed,
                                    Parts parts) {
    int tile = blockIdx.x / splits, row = blockIdx.z, start = static_cast<int>(x.write_index[row]);
    auto load = [&](int token, int head) {
        Head<D> query = load_head<T, D>(x.projected(row, token, head, D));
        return times(prepared<T, D>(query, x, x.q_norm, start + token), x.scale * LOG2_E);
    };
    Tile at = {row, tile, tile, static_cast<int>(gridDim.x) / splits};
    attend_wide<T, D, TILES, WIDE_CLASSES>(x, at, splits, buffers, load, mixed, parts);
}

// Prepared queries of prompt runs: grid (the largest number of row tiles that the runs can have, kv_heads).
template <class T, int D, int TILES>
__device__ void attend_all_wide(Operands<T> x, const int* starts, int runs, int buffers, typename T::Element* mixed) {
    RunTile tile = tile_of(starts, runs, x.heads / x.kv_heads, 16 * TILES, blockIdx.x);
    if (tile.run < 0) return;
    i64 first = static_cast<i64>(starts[tile.run]) * x.heads * D;
    x.query = starts[tile.run + 1] - starts[tile.run];
    x.qkv += first;
    x.block_table += static_cast<i64>(tile.run) * x.max_blocks;
    x.write_index += tile.run;
    auto load = [&](int token, int head) {
        return load_head<T, D>(x.qkv + (static_cast<i64>(token) * x.heads + head) * D);
    };
    Tile at = {0, tile.tile, static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x)};
    attend_wide<T, D, TILES, 1>(x, at, 1, buffers, load, mixed + first, Parts{});
}
