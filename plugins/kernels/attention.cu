// window_attention: attention of new tokens over a paged cache, which gets their keys and values.
//
// attend_<dtype>_<D>_<rows>, 128 threads, grid (splits * row tiles, kv_heads, batch): with `append` it writes the new
// keys and values itself (possible where all rows of a KV head are one tile); otherwise append_<dtype>_<D> runs before.
// Two blocks are meant to be resident per multiprocessor: three stages of two blocks keep its share of memory busy.
#include "attention_merge.cuh"
#include "attention_plain.cuh"
#include "variants.cuh"

template <class T, int D, int TILES>
__device__ void attend(const Operands<T>& x, int splits, bool append, typename T::Element* mixed, Parts parts) {
    constexpr int ROWS = 16 * TILES, SPAN = KEYS * TILES / WARPS, STAGE = 2 * KEYS * D;
    extern __shared__ __align__(1024) unsigned char memory[];
    __shared__ float2 bounds[WARPS][16];
    u16* stages = reinterpret_cast<u16*>(memory);

    // Row tiles in reverse: those with the most keys start first.
    int row_tiles = gridDim.x / splits, tile = row_tiles - 1 - blockIdx.x / splits, split = blockIdx.x % splits;
    int kv_head = blockIdx.y, row = blockIdx.z, group = x.heads / x.kv_heads;
    int lines = min(ROWS, x.query * group - tile * ROWS);
    int start = static_cast<int>(x.write_index[row]);
    int first_seen = start + tile * ROWS / group, last_seen = start + (tile * ROWS + lines - 1) / group;

    Range range;
    int reach = x.sliding_window ? x.sliding_window : 0x7fffffff;
    range.begin = max(0, first_seen - reach + 1);
    range.end = x.bounded(last_seen + 1);
    range.stored = append ? start : range.end;
    int skipped = range.begin / KEYS, steps = (range.end + KEYS - 1) / KEYS - skipped, active = min(splits, steps);
    if (split >= active) return;
    range.first = skipped + steps * split / active;
    range.last = skipped + steps * (split + 1) / active;

    int block = x.block_of(row, range.first * KEYS);
    auto fetch_step = [&](int step) {
        if (step < range.last) {
            fetch<T, D>(x, stages + (step - range.first) % STAGES * STAGE, range, step, block, row, kv_head);
            if (step + 1 < range.last) block = x.block_of(row, (step + 1) * KEYS);
        }
        close_copies();
    };
#pragma unroll 1
    for (int i = 0; i < STAGES - 1; ++i) fetch_step(range.first + i);

    int warp = threadIdx.x / 32, packed = tile * ROWS + warp % TILES * 16;
    u32 q[D / 16][4];
    load_queries<T, D>(q, x, row, kv_head, packed, start);
    Rows<D> rows;
    for (int step = range.first; step < range.last; ++step) {
        wait_copies<STAGES - 2>();
        __syncthreads();
        fetch_step(step + STAGES - 1);
        const u16* keys = stages + (step - range.first) % STAGES * STAGE;
        int line = warp / TILES * SPAN, position = step * KEYS;
        bool masked = position + KEYS - 1 > first_seen || last_seen - position >= reach;
        accumulate<T, D, SPAN>(rows, q, keys, line, Mask{masked, position + line, reach, start, packed, group});
    }

    float* sums = reinterpret_cast<float*>(memory);
    share_rows<D, TILES>(rows, sums, bounds);
    auto write = [&](int line, int column, float4 value) {
        int token = (tile * ROWS + line) / group, head = kv_head * group + (tile * ROWS + line) % group;
        auto* to = mixed + (static_cast<i64>(row * x.query + token) * x.heads + head) * D + column;
        T::store2(to, make_float2(value.x, value.y));
        T::store2(to + 2, make_float2(value.z, value.w));
    };
    int ticket = (row * x.kv_heads + kv_head) * row_tiles + tile;
    i64 part = static_cast<i64>(ticket) * splits * ROWS, mine = part + split * ROWS;
    for (int i = threadIdx.x; i < lines * (D / 4); i += 32 * WARPS) {
        int line = i / (D / 4), column = i % (D / 4) * 4;
        float2 of_line = bounds_of<TILES>(bounds, line);
        float4 sum = sum_of<D, TILES>(sums, line, column);
        float share = 1 / of_line.y;
        if (active == 1) {
            write(line, column, make_float4(sum.x * share, sum.y * share, sum.z * share, sum.w * share));
        } else {
            *reinterpret_cast<float4*>(parts.sums + (mine + line) * D + column) = sum;
            if (column == 0) parts.bounds[mine + line] = of_line;
        }
    }
    if (active == 1 || !is_last(parts.tickets + ticket, active)) return;

    float* shares = reinterpret_cast<float*>(memory);
    share_of_splits<ROWS>(shares, parts.bounds + part, active, lines);
    sum_splits<D, ROWS>(parts.sums + part * D, shares, active, lines, write);
}

#define INPUTS(T)                                                                                                     \
    const T::Element *qkv, const T::Element *, const T::Element *, const int *block_table, const i64 *write_index,    \
        const T::Element *cosine, const T::Element *sine, const T::Element *q_norm, const T::Element *k_norm
#define SIZES int query, int heads, int kv_heads, int block_size, int max_blocks, int sliding_window
#define OPERANDS(T)                                                                                                   \
    Operands<T> { qkv, key_cache, value_cache, block_table, write_index, cosine, sine, q_norm, k_norm, query, heads,  \
                  kv_heads, block_size, max_blocks, sliding_window, scale, epsilon }

#define APPEND(NAME, T, D)                                                                                            \
    extern "C" __global__ void __launch_bounds__(128) append_##NAME##_##D(                                            \
        INPUTS(T), SIZES, float scale, float epsilon, T::Element* key_cache, T::Element* value_cache) {               \
        append_all<T, D>(OPERANDS(T));                                                                                \
    }
#define ATTEND(NAME, T, D, ROWS)                                                                                      \
    extern "C" __global__ void __launch_bounds__(128, 2) attend_##NAME##_##D##_##ROWS(               \
        INPUTS(T), SIZES, int splits, int append, float scale, float epsilon, T::Element* mixed,                      \
        T::Element* key_cache, T::Element* value_cache, float* sums, float2* bounds, int* tickets) {                  \
        attend<T, D, ROWS / 16>(OPERANDS(T), splits, append, mixed, Parts{sums, bounds, tickets});                    \
    }
#define ATTEND_PLAINLY(NAME, T, D)                                                                                    \
    extern "C" __global__ void __launch_bounds__(128) attend_##NAME##_##D(INPUTS(T), SIZES, float scale,              \
        float epsilon, T::Element* mixed, T::Element* key_cache, T::Element* value_cache) {                           \
        attend_plainly<T, D>(OPERANDS(T), mixed);                                                                     \
    }
#define TENSOR_CORE(NAME, T, D) APPEND(NAME, T, D) ATTEND(NAME, T, D, 16) ATTEND(NAME, T, D, 32) ATTEND(NAME, T, D, 64)
#define PLAIN(NAME, T, D) APPEND(NAME, T, D) ATTEND_PLAINLY(NAME, T, D)

IF_BF16(FOR_HEAD_DIMS(TENSOR_CORE, bf16, Bf16))
IF_FP16(FOR_HEAD_DIMS(TENSOR_CORE, fp16, Fp16))
IF_FP32(FOR_HEAD_DIMS(PLAIN, fp32, Fp32))
