// Sums whose order depends on positions alone, for batch invariance: each warp's classes of keys in their order, then
// the warps of a row tile. One block may have all classes, or two blocks a half each, or every class its own block: the
// operations and their order are the same, and so are the bits.
#pragma once

#include "attention_block.cuh"
#include "early.cuh"

constexpr int FIXED_CLASSES = 4;
constexpr int ALL_ROWS = 16 * WARPS;  // rows of a partial result of a block: a warp has 16
constexpr int SETS = 2;               // most partial results of a block

// Parts of a wide value, whose columns would not fit in the registers of one warp. Each has WARPS warps, which all
// compute the scores.
template <int D>
constexpr int VALUE_PARTS = D > 128 ? 2 : 1;
template <int D>
constexpr int FIXED_WARPS = WARPS * VALUE_PARTS<D>;

// A thread's warp among those of its part, and the part.
template <int D>
struct Worker {
    int warp, part;

    __device__ Worker()
        : warp(VALUE_PARTS<D> > 1 ? threadIdx.x / 32 % WARPS : threadIdx.x / 32),
          part(VALUE_PARTS<D> > 1 ? threadIdx.x / 32 / WARPS : 0) {}
};

// a * by + b * other, rounded in the same places everywhere: the compiler may not choose.
__device__ inline float fixed_sum(float a, float by, float b, float other) {
    return __fmaf_rn(a, by, __fmul_rn(b, other));
}

// The factors of two partial results in their sum. `bound`, the largest score and the sum of weights, becomes that of
// the sum.
struct Shares {
    float mine, other;

    __device__ Shares(float2& bound, float2 added) {
        float largest = fmaxf(bound.x, added.x);
        mine = fraction(bound.x, largest);
        other = fraction(added.x, largest);
        bound = make_float2(largest, fixed_sum(bound.y, mine, added.y, other));
    }
};

// A partial result of four columns of a row.
struct Columns {
    float2 bound = make_float2(-INFINITE, 0);
    float4 sum = make_float4(0, 0, 0, 0);

    __device__ void add(const Columns& x) {
        Shares by(bound, x.bound);
        sum.x = fixed_sum(sum.x, by.mine, x.sum.x, by.other);
        sum.y = fixed_sum(sum.y, by.mine, x.sum.y, by.other);
        sum.z = fixed_sum(sum.z, by.mine, x.sum.z, by.other);
        sum.w = fixed_sum(sum.w, by.mine, x.sum.w, by.other);
    }
};

// Add rows whose weights are those of all threads.
template <int C>
__device__ void add_rows(Rows<C>& to, const Rows<C>& rows) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        float2 bound = make_float2(to.largest[half], to.weights[half]);
        Shares by(bound, make_float2(rows.largest[half], rows.weights[half]));
        to.largest[half] = bound.x;
        to.weights[half] = bound.y;
#pragma unroll
        for (int n = 0; n < C / 8; ++n)
#pragma unroll
            for (int i = 2 * half; i < 2 * half + 2; ++i)
                to.sum[n][i] = fixed_sum(to.sum[n][i], by.mine, rows.sum[n][i], by.other);
    }
}

// The rows of a warp's classes so far. The last of two blocks keeps its last class apart: it is added after its first
// one, and that after those of the other block.
template <int C>
struct ClassSums {
    Rows<C> all;

    __device__ void end_class(Rows<C>& rows, bool apart) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            rows.weights[half] += __shfl_xor_sync(0xffffffffu, rows.weights[half], 1);
            rows.weights[half] += __shfl_xor_sync(0xffffffffu, rows.weights[half], 2);
        }
        if (apart) return;
        add_rows<C>(all, rows);
        rows = Rows<C>();
    }
};

// Put the warps' rows into shared memory: sums [ALL_ROWS][D + 8], bounds [ALL_ROWS].
template <class T, int D, int HELPERS, int C>
__device__ void share_all_rows(const Rows<C>& rows, float* sums, float2* bounds) {
    constexpr int V = D / VALUE_PARTS<D>, EACH = COLUMNS<T, D>;
    auto [warp, part] = Worker<D>();
    int lane = threadIdx.x % 32, helper = warp % HELPERS;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        int line = (warp - helper) * 16 + lane / 4 + 8 * half;
        if (part == 0 && helper == 0 && lane % 4 == 0)
            bounds[line] = make_float2(rows.largest[half], rows.weights[half]);
#pragma unroll
        for (int i = 0; i < C / EACH; ++i) {
            int column = (i * HELPERS + helper) * EACH;
            if (column >= V) break;
            const auto& sum = reinterpret_cast<const float (&)[EACH / 8][4]>(rows.sum[i * (EACH / 8)]);
            T::template spread<EACH>(sums + line * (D + 8) + part * V + column, sum, half, 1);
        }
    }
}

// Where the blocks that share a row tile have their rows: this block's memory, that of a cluster, or global memory. Row
// ALL_ROWS * s + r is row r of set s.
struct InBlock {
    const float* sums;
    const float2* bounds;
    int width;

    __device__ Columns at(int, int row, int column) const {
        return {bounds[row], *reinterpret_cast<const float4*>(sums + row * width + column)};
    }
};

struct InGlobal {
    const float* sums;
    const float2* bounds;
    int width;

    __device__ Columns at(int block, int row, int column) const {
        i64 line = static_cast<i64>(block) * SETS * ALL_ROWS + row;
        return {__ldcg(bounds + line), __ldcg(reinterpret_cast<const float4*>(sums + line * width + column))};
    }
};

#if __CUDA_ARCH__ >= 900
struct InCluster {
    u32 sums, bounds;
    int width;

    __device__ Columns at(int block, int row, int column) const {
        return {load_remote2(address_in(bounds + row * 8, block)),
                load_remote4(address_in(sums + (row * width + column) * 4, block))};
    }
};
#endif

// Calls write(line, column, Columns) for four columns at a time: units `first` to `last` of the tile. Neighbouring
// threads sum the warps that share a row.
template <int D, int TILES, class Place, class Write>
__device__ void sum_fixed(const Place& place, int splits, int first, int last, Write write) {
    constexpr int EACH = WARPS / TILES, UNITS = 32 * FIXED_WARPS<D> / EACH;
    int part = threadIdx.x % EACH, lane = threadIdx.x % 32;
    for (int base = first; base < last; base += UNITS) {
        int unit = base + static_cast<int>(threadIdx.x) / EACH;
        int line = min(unit, last - 1) / (D / 4), column = min(unit, last - 1) % (D / 4) * 4;
        int row = (line / 16 + part * TILES) * 16 + line % 16;
        Columns results[FIXED_CLASSES], mine, all;  // of two blocks: of the first, and of both classes of the second
        int count = splits == 2 ? 3 : splits;
#pragma unroll
        for (int i = 0; i < FIXED_CLASSES; ++i)
            if (i < count) results[i] = place.at(min(i, splits - 1), row + (i < splits ? 0 : ALL_ROWS), column);
#pragma unroll
        for (int i = 0; i < FIXED_CLASSES; ++i)
            if (i < count) mine.add(results[i]);
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            Columns other;
            auto of = [&](float x) { return __shfl_sync(0xffffffffu, x, lane - part + i); };
            other.bound = make_float2(of(mine.bound.x), of(mine.bound.y));
            other.sum = make_float4(of(mine.sum.x), of(mine.sum.y), of(mine.sum.z), of(mine.sum.w));
            all.add(other);
        }
        if (part == 0 && unit < last) write(line, column, all);
    }
}

// The end of a block: `lines` rows of a tile, by all blocks that share it. `last` is its class that is kept apart, if
// any. `ticket` counts tiles.
template <class T, int D, int TILES, int HELPERS, bool FEW, int C, class Write>
__device__ void merge_fixed(const ClassSums<C>& first, const Rows<C>& last, float* sums, int split, int splits,
                            int lines, int ticket, Parts parts, Write write) {
    constexpr int SET = ALL_ROWS * (D + 8);
    __shared__ float2 bounds[SETS * ALL_ROWS];
    int sets = splits == 2 && split == 1 ? 2 : 1;
    __syncthreads();  // all warps are done with keys and values, whose memory `sums` reuses
    share_all_rows<T, D, HELPERS>(first.all, sums, bounds);
    if (sets == 2) share_all_rows<T, D, HELPERS>(last, sums + SET, bounds + ALL_ROWS);
    __syncthreads();
    int units = lines * (D / 4);
    if (splits == 1) {
        sum_fixed<D, TILES>(InBlock{sums, bounds, D + 8}, 1, 0, units, write);
        return;
    }
#if __CUDA_ARCH__ >= 900
    if (FEW || cluster_size() > 1) {
        arrive_at_cluster();
        wait_for_cluster();
        InCluster places = {shared_address(sums), shared_address(bounds), D + 8};
        sum_fixed<D, TILES>(places, splits, units * split / splits, units * (split + 1) / splits, write);
        arrive_at_cluster();  // no block exits while others read its memory
        wait_for_cluster();
        return;
    }
#endif
    i64 part = static_cast<i64>(ticket) * splits * SETS * ALL_ROWS, mine = part + split * SETS * ALL_ROWS;
    for (int unit = threadIdx.x; unit < sets * ALL_ROWS * (D / 4); unit += 32 * FIXED_WARPS<D>) {
        const float* from = sums + unit / (D / 4) * (D + 8) + unit % (D / 4) * 4;
        *reinterpret_cast<float4*>(parts.sums + mine * D + unit * 4) = *reinterpret_cast<const float4*>(from);
    }
    if (threadIdx.x < sets * ALL_ROWS) parts.bounds[mine + threadIdx.x] = bounds[threadIdx.x];
    if (!is_last(parts.tickets + ticket, splits)) return;
    sum_fixed<D, TILES>(InGlobal{parts.sums + part * D, parts.bounds + part, D}, splits, 0, units, write);
}

// The steps of KEYS positions that a block takes, in its order. Step s of a text belongs to class s % classes; a block
// takes its classes one after another.
struct ClassSteps {
    int begin, end, classes, of_class, last_class;  // steps from `begin` to `end`
    int step;

    __device__ ClassSteps(int begin, int end, int classes, int first_class, int count)
        : begin(begin), end(end), classes(classes), of_class(first_class), last_class(first_class + count - 1),
          step(first()) {
        skip_empty();
    }
    __device__ int first() const { return begin + (of_class + classes - begin % classes) % classes; }
    __device__ bool there() const { return step < end; }
    __device__ void next() {
        step += classes;
        skip_empty();
    }
    __device__ void skip_empty() {
        while (step >= end && of_class < last_class) {
            ++of_class;
            step = first();
        }
    }
};

// One of them, and its place among the stages.
struct PlacedStep {
    int stored, end, step, place;

    __device__ int index(int other) const { return other == step ? place : -1; }
};

// Warps that share a row tile where no row is in the others. Blocks of compute capability 8.6, 8.9 and 12.0 have no
// shared memory for scores beside that of keys and values.
#if __CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1200
template <int TILES>
constexpr int FEW_HELPERS = TILES;
#else
template <int TILES>
constexpr int FEW_HELPERS = 1;
#endif

// Whether the code of few rows is smaller. Before compute capability 9.0 registers would not suffice.
#if __CUDA_ARCH__ >= 900
constexpr bool FEW_IN_LESS_CODE = true;
#else
constexpr bool FEW_IN_LESS_CODE = false;
#endif

// As attend of attention_block.cuh, for windows. `splits` is 1, 2 or FIXED_CLASSES. May be launched early (early.cuh).
// FEW: for rows that are all in the first 16 of one tile, so that the warps may help each other.
template <class T, int D, int TILES, bool FEW>
__device__ void attend_fixed(const Operands<T>& x, Tile at, int splits, bool append, typename T::Element* mixed,
                             Parts parts) {
    constexpr int HELPERS = FEW ? FEW_HELPERS<TILES> : 1;
    constexpr bool SMALL = FEW && FEW_IN_LESS_CODE;
    constexpr int ROWS = 16 * TILES, SPAN = KEYS * TILES / WARPS, STAGE = 2 * KEYS * WIDTH<T, D>;
    constexpr int V = D / VALUE_PARTS<D>, C = HELPER_COLUMNS<T, D, V, HELPERS>;
    extern __shared__ __align__(1024) unsigned char memory[];
    u16* stages = reinterpret_cast<u16*>(memory);
    ProjectedQueries<T, D, SMALL> queries;

    int row = at.row, tile = at.index, split = blockIdx.x % splits;
    int kv_head = blockIdx.y, group = x.heads / x.kv_heads;
    int lines = min(ROWS, x.query * group - tile * ROWS);
    auto [warp, value_part] = Worker<D>();
    int own_tile = HELPERS > 1 ? 0 : warp % TILES, packed = tile * ROWS + own_tile * 16;
    bool works = own_tile * 16 < lines;
    Helper<HELPERS> helper;
    if constexpr (HELPERS > 1) {
        __shared__ float scores[VALUE_PARTS<D> * WARPS / HELPERS][16 * (SPAN + 8)];
        helper = {scores[(value_part * WARPS + warp) / HELPERS], warp % HELPERS};
    }

    Table table(x.block_table + static_cast<i64>(row) * x.max_blocks, x.max_blocks);
    int start = static_cast<int>(x.write_index[row]);
    int first_seen = start + tile * ROWS / group, last_seen = start + (tile * ROWS + lines - 1) / group;
    int reach = x.sliding_window ? x.sliding_window : 0x7fffffff;
    Range range = {};
    range.begin = max(0, first_seen - reach + 1);
    range.end = x.bounded(last_seen + 1);
    range.stored = append ? start : range.end;
    int each = FIXED_CLASSES / splits;
    // Classes are counted from the beginning of the text, so what a class has depends on positions alone.
    ClassSteps next(range.begin / KEYS, (range.end + KEYS - 1) / KEYS, FIXED_CLASSES, split * each, each);
    ClassSteps fetched = next, current = next;

    int block = fetched.there() ? table[fetched.step * KEYS / x.block_size] : 0;
    auto fetch_step = [&](int i) {
        if (fetched.there()) {
            fetch<T, D, FIXED_WARPS<D>, SMALL>(x, stages + i % STAGES * STAGE, range, fetched.step, block, kv_head);
            fetched.next();
            if (fetched.there()) block = table[fetched.step * KEYS / x.block_size];
        }
        close_copies();
    };
#pragma unroll 1
    for (int i = 0; i < STAGES; ++i) fetch_step(i);
    wait_for_previous();  // which may still write the projection; keys that are stored come from earlier kernels
    u32 q[D / 16][4];
    queries.load(q, x, row, kv_head, packed);
    NewTokens<T, D, FIXED_WARPS<D>, SMALL> fresh;
    if (append) fresh.load(x, 0, start, row, kv_head);
    queries.prepare(q, x, packed, start);

    Rows<C> rows;
    ClassSums<C> sums;
    // A step's new tokens are placed while the step before it is next to be multiplied.
#pragma unroll 1
    for (int i = -1;; ++i) {
        if (append && next.there() && (next.step + 1) * KEYS > range.stored) {
            PlacedStep placed = {range.stored, range.end, next.step, i + 1};
            constexpr int LOADED = fresh.ALL;
#pragma unroll 1
            for (int token = 0; token < x.query; token += LOADED) {
                if (x.query > LOADED) fresh.load(x, token, start, row, kv_head);
                fresh.place(x, stages, placed, table, kv_head);
            }
        }
        if (i >= 0) {
            if (i == 0) {
                wait_copies<STAGES - 1>();
            } else {
                wait_copies<STAGES - 2>();
            }
            __syncthreads();
            if (i > 0) fetch_step(i + STAGES - 1);
            const u16* keys = stages + i % STAGES * STAGE;
            int line = warp / TILES * SPAN, position = current.step * KEYS;
            bool masked = position + KEYS - 1 > first_seen || last_seen - position >= reach;
            Mask mask{masked, position + line, reach, start, packed, group};
            if (works) accumulate<T, D, SPAN, V, HELPERS>(rows, q, keys, line, mask, value_part, Causal{}, helper);
            bool ends = !next.there() || next.of_class != current.of_class;
            bool apart = splits == 2 && split == 1 && current.of_class == current.last_class;
            if (works && ends) sums.end_class(rows, apart);
        }
        if (!next.there()) break;
        current = next;
        next.next();
    }

    auto write = [&](int line, int column, const Columns& all) {
        int token = (tile * ROWS + line) / group, head = kv_head * group + (tile * ROWS + line) % group;
        auto* to = mixed + (static_cast<i64>(row * x.query + token) * x.heads + head) * D + column;
        // Here and not before all keys, where a sink takes registers of the loop over them.
        float weights = all.bound.y + (x.sinks ? exp2f(x.sinks[head] * LOG2_E - all.bound.x) : 0);
        float4 value = scaled(all.sum, __frcp_rn(weights));
        if constexpr (T::FLOAT8) value = scaled(value, x.value_scale);
        T::store2(to, make_float2(value.x, value.y));
        T::store2(to + 2, make_float2(value.z, value.w));
    };
    int ticket = (row * x.kv_heads + kv_head) * at.all + at.number;
    auto* shared = reinterpret_cast<float*>(memory);
    merge_fixed<T, D, TILES, HELPERS, FEW>(sums, rows, shared, split, splits, lines, ticket, parts, write);
}

// Windows: grid (splits * row tiles, kv_heads, batch), row tiles in reverse as in attend_windows.
template <class T, int D, int TILES>
__device__ void attend_windows_fixed(const Operands<T>& x, int splits, bool append, typename T::Element* mixed,
                                     Parts parts) {
    int row_tiles = gridDim.x / splits, tile = row_tiles - 1 - blockIdx.x / splits;
    Tile at = {static_cast<int>(blockIdx.z), tile, tile, row_tiles};
    attend_fixed<T, D, TILES, false>(x, at, splits, append, mixed, parts);
}

// Windows of few rows, see attend_fixed: grid (splits, kv_heads, batch). Between two layers other kernels replace code
// in the caches, so that one kernel for few and for many rows would take longer to read than to run.
template <class T, int D, int TILES>
__device__ void attend_few_fixed(const Operands<T>& x, int splits, bool append, typename T::Element* mixed,
                                 Parts parts) {
    Tile at = {static_cast<int>(blockIdx.z), 0, 0, 1};
    attend_fixed<T, D, TILES, true>(x, at, splits, append, mixed, parts);
}
