/* The operator tiled_matmul as a custom operator of onnxruntime: x @ w.T for weights in float32, float16 or bfloat16
 * that lie in tiles (plugins/operators/float_tiles.py). Products and sums are in float32.
 *
 * A row has the same bits in any call: every output adds its products one after the other, in the order of the inputs.
 * The weights are read where they lie, so nothing is copied when a graph loads.
 */
#include <math.h>
#include <string.h>

#include "custom_operator.h"

#define COLUMNS 16                                 /* outputs of a tile */
#define TILES 4                                    /* tiles of an item, which one thread computes */
#define ROWS 128                                   /* its rows: they stay in the second cache while all tiles pass */
enum { FLOAT32 = 1, FLOAT16 = 10, BFLOAT16 = 16 }; /* onnxruntime's element types */

typedef struct {
    const float* x;
    const void* weight; /* [tiles, inner, COLUMNS] */
    float* out;
    size_t rows, inner, width;
    int type; /* of the weight's elements */
} Call;

static void store(const Call* call, size_t row, size_t tile, const float* sums) {
    const size_t begin = tile * COLUMNS, left = call->width - begin;
    memcpy(call->out + row * call->width + begin, sums, sizeof(float) * (left < COLUMNS ? left : COLUMNS));
}

/* ---- portable ---- */

static float from_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof(value));
    return value;
}

static float from_half(uint16_t half) {
    const uint32_t sign = (uint32_t)(half & 0x8000) << 16, exponent = half >> 10 & 31, mantissa = half & 1023;
    if (exponent == 31) return from_bits(sign | 0x7f800000 | mantissa << 13);
    if (exponent) return from_bits(sign | (exponent + 112) << 23 | mantissa << 13);
    return sign ? -(float)mantissa * 0x1p-24f : (float)mantissa * 0x1p-24f;
}

static float element(const Call* call, size_t at) {
    if (call->type == FLOAT32) return ((const float*)call->weight)[at];
    const uint16_t bits = ((const uint16_t*)call->weight)[at];
    return call->type == FLOAT16 ? from_half(bits) : from_bits((uint32_t)bits << 16);
}

static void rows_portable(const Call* call, size_t first, size_t last, size_t row, size_t end) {
    for (size_t tile = first; tile < last; tile++)
        for (size_t r = row; r < end; r++) {
            float sums[COLUMNS] = {0};
            for (size_t k = 0; k < call->inner; k++)
                for (size_t column = 0; column < COLUMNS; column++) {
                    const float x = call->x[r * call->inner + k],
                                w = element(call, (tile * call->inner + k) * COLUMNS + column);
#ifdef FP_FAST_FMAF
                    sums[column] = fmaf(x, w, sums[column]);
#else
                    sums[column] += x * w;
#endif
                }
            store(call, r, tile, sums);
        }
}

/* ---- x86-64 with AVX2 ---- */

#if defined(__x86_64__) && !defined(PORTABLE)
#ifdef NO_AVX512
#include "avx2.h"
#else
#include <immintrin.h>
#endif
#define AVX2 __attribute__((target("avx2,fma,f16c")))
#define INLINE AVX2 __attribute__((always_inline)) static inline
#define UNROLL _Pragma("GCC unroll 16") /* else arrays of vectors do not stay in registers */
#define AHEAD 2048                      /* bytes between a load and its prefetch */
#define PART 768                        /* inputs of a tile that many rows read before the next ones */

INLINE size_t size_of(const int type) { return type == FLOAT32 ? 4 : 2; }

/* Load eight elements at ``at`` bytes. */
INLINE __m256 load(const char* at, const int type) {
    if (type == FLOAT32) return _mm256_loadu_ps((const float*)at);
    const __m128i halves = _mm_loadu_si128((const __m128i*)at);
    if (type == FLOAT16) return _mm256_cvtph_ps(halves);
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
}

/* Add the products of the inputs from ``begin`` to ``end`` to ``rows`` rows of a tile. Their sums lie in ``out`` unless
 * ``begin`` is 0. The sums of 6 rows fit into the registers. ``prefetch``: the weights come from memory, and slower
 * than the processor's own prefetches. */
INLINE void block(const Call* call, size_t tile, size_t row, const int rows, const int type, const int prefetch,
                  size_t begin, size_t end) {
    const size_t inner = call->inner;
    const char* weight = (const char*)call->weight + (tile * inner + begin) * COLUMNS * size_of(type);
    const float* x = call->x + row * inner;
    float* out = call->out + row * call->width + tile * COLUMNS;
    __m256 sums[6][2];
    UNROLL
    for (int r = 0; r < rows; r++) {
        sums[r][0] = begin ? _mm256_loadu_ps(out + (size_t)r * call->width) : _mm256_setzero_ps();
        sums[r][1] = begin ? _mm256_loadu_ps(out + (size_t)r * call->width + 8) : _mm256_setzero_ps();
    }
    _Pragma("GCC unroll 2") for (size_t k = begin; k < end; k++, weight += COLUMNS * size_of(type)) {
        if (prefetch) _mm_prefetch(weight + AHEAD, _MM_HINT_T0); /* would slow down blocks that read a cache */
        const __m256 low = load(weight, type), high = load(weight + 8 * size_of(type), type);
        UNROLL
        for (int r = 0; r < rows; r++) {
            const __m256 value = _mm256_broadcast_ss(x + (size_t)r * inner + k);
            sums[r][0] = _mm256_fmadd_ps(value, low, sums[r][0]);
            sums[r][1] = _mm256_fmadd_ps(value, high, sums[r][1]);
        }
    }
    const int whole = call->width - tile * COLUMNS >= COLUMNS; /* not in a narrow last tile */
    UNROLL
    for (int r = 0; r < rows; r++) {
        float all[COLUMNS], *to = whole ? out + (size_t)r * call->width : all;
        _mm256_storeu_ps(to, sums[r][0]);
        _mm256_storeu_ps(to + 8, sums[r][1]);
        if (!whole) store(call, row + (size_t)r, tile, all);
    }
}

/* Define functions for weights of one type: compilers take long for a block, so there is one copy of each. */
#define CASE(rows, type, prefetch) \
    case rows: block(call, tile, row, rows, type, prefetch, begin, end); break;
#define ARGUMENTS const Call *call, size_t tile, size_t row, size_t rows, size_t begin, size_t end
#define FOR_TYPE(suffix, type)                                                                           \
    AVX2 static void first_rows_##suffix(ARGUMENTS) {                                                    \
        switch (rows) {                                                                                  \
            CASE(1, type, 0)                                                                             \
            CASE(2, type, 1)                                                                             \
            CASE(3, type, 1)                                                                             \
            CASE(4, type, 1)                                                                             \
            CASE(5, type, 1)                                                                             \
            CASE(6, type, 1)                                                                             \
        }                                                                                                \
    }                                                                                                    \
    /* The weights are in a cache since the first rows. No block of more than 6 rows has less than 3. */ \
    AVX2 static void later_rows_##suffix(ARGUMENTS) {                                                    \
        switch (rows) {                                                                                  \
            CASE(3, type, 0)                                                                             \
            CASE(4, type, 0)                                                                             \
            CASE(5, type, 0)                                                                             \
            CASE(6, type, 0)                                                                             \
        }                                                                                                \
    }

FOR_TYPE(float32, FLOAT32)
FOR_TYPE(float16, FLOAT16)
FOR_TYPE(bfloat16, BFLOAT16)

typedef void Block(ARGUMENTS);

AVX2 static void rows_avx2(const Call* call, size_t first, size_t last, size_t row, size_t end) {
    const int type = call->type;
    Block* first_rows = type == FLOAT32   ? first_rows_float32
                        : type == FLOAT16 ? first_rows_float16
                                          : first_rows_bfloat16;
    Block* later_rows = type == FLOAT32   ? later_rows_float32
                        : type == FLOAT16 ? later_rows_float16
                                          : later_rows_bfloat16;
    const size_t inner = call->inner, blocks = count_of(end - row, 6);
    for (size_t tile = first; tile < last; tile++) {
        /* A part of a tile stays in the second cache while all rows pass. The sums of a narrow tile have no place in
         * out. */
        const int whole = blocks == 1 || call->width - tile * COLUMNS < COLUMNS;
        const size_t part = whole ? inner : count_of(inner, count_of(inner, PART));
        for (size_t begin = 0; begin < inner; begin += part) {
            const size_t stop = begin + part < inner ? begin + part : inner;
            for (size_t r = row, left = blocks; left; left--) {
                const size_t rows = count_of(end - r, left); /* blocks of about equal size */
                (r == row ? first_rows : later_rows)(call, tile, r, rows, begin, stop);
                r += rows;
            }
        }
    }
}

/* ---- x86-64 with AVX-512 ---- */

#ifndef NO_AVX512
#define AVX512 __attribute__((target("avx512f,fma,f16c")))
#define WIDE_ROWS 12
#define WIDE_PART 256 /* inputs of two tiles that stay in the first cache while many rows read them */
#define INLINE512 AVX512 __attribute__((always_inline)) static inline

/* Load sixteen elements at ``at`` bytes. */
INLINE512 __m512 load_tile(const char* at, const int type) {
    if (type == FLOAT32) return _mm512_loadu_ps((const float*)at);
    const __m256i halves = _mm256_loadu_si256((const __m256i*)at);
    if (type == FLOAT16) return _mm512_cvtph_ps(halves);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
}

/* Compute what block computes, for the tile at ``weight`` and the one ``next`` bytes after it, or for the first one
 * twice if that is 0. The sums of WIDE_ROWS rows fit into the registers. */
INLINE512 void wide_block(const Call* call, const char* weight, size_t next, size_t tile, size_t row, const int rows,
                          const int type, const int prefetch, size_t begin, size_t end) {
    const size_t inner = call->inner, bytes = COLUMNS * size_of(type), left = call->width - tile * COLUMNS;
    const float* x = call->x + row * inner;
    float* out = call->out + row * call->width + tile * COLUMNS;
    const __mmask16 low = left < COLUMNS ? (__mmask16)((1u << left) - 1) : 0xffff;
    const __mmask16 high = !next ? 0 : left < 2 * COLUMNS ? (__mmask16)((1u << (left - COLUMNS)) - 1) : 0xffff;
    __m512 sums[WIDE_ROWS][2];
    UNROLL
    for (int r = 0; r < rows; r++) {
        const float* from = out + (size_t)r * call->width;
        sums[r][0] = begin ? _mm512_maskz_loadu_ps(low, from) : _mm512_setzero_ps();
        sums[r][1] = begin ? _mm512_maskz_loadu_ps(high, from + COLUMNS) : _mm512_setzero_ps();
    }
    for (size_t k = begin; k < end; k++, weight += bytes) {
        if (prefetch) {
            _mm_prefetch(weight + AHEAD, _MM_HINT_T0);
            _mm_prefetch(weight + next + AHEAD, _MM_HINT_T0);
        }
        const __m512 columns = load_tile(weight, type), next_columns = load_tile(weight + next, type);
        UNROLL
        for (int r = 0; r < rows; r++) {
            const __m512 value = _mm512_set1_ps(x[(size_t)r * inner + k]);
            sums[r][0] = _mm512_fmadd_ps(value, columns, sums[r][0]);
            sums[r][1] = _mm512_fmadd_ps(value, next_columns, sums[r][1]);
        }
    }
    UNROLL
    for (int r = 0; r < rows; r++) {
        float* to = out + (size_t)r * call->width;
        _mm512_mask_storeu_ps(to, low, sums[r][0]);
        _mm512_mask_storeu_ps(to + COLUMNS, high, sums[r][1]);
    }
}

#define WIDE_CASE(rows, type, prefetch) \
    case rows: wide_block(call, weight, next, tile, row, rows, type, prefetch, begin, end); break;
#define WIDE_ARGUMENTS \
    const Call *call, const char *weight, size_t next, size_t tile, size_t row, size_t rows, size_t begin, size_t end
#define WIDE_FOR_TYPE(suffix, type)                               \
    AVX512 static void wide_first_rows_##suffix(WIDE_ARGUMENTS) { \
        switch (rows) {                                           \
            WIDE_CASE(2, type, 1)                                 \
            WIDE_CASE(3, type, 1)                                 \
            WIDE_CASE(4, type, 1)                                 \
            WIDE_CASE(5, type, 1)                                 \
            WIDE_CASE(6, type, 1)                                 \
            WIDE_CASE(7, type, 1)                                 \
            WIDE_CASE(8, type, 1)                                 \
            WIDE_CASE(9, type, 1)                                 \
            WIDE_CASE(10, type, 1)                                \
            WIDE_CASE(11, type, 1)                                \
            WIDE_CASE(12, type, 1)                                \
        }                                                         \
    }

WIDE_FOR_TYPE(float32, FLOAT32)
WIDE_FOR_TYPE(float16, FLOAT16)
WIDE_FOR_TYPE(bfloat16, BFLOAT16)

/* No block of more than WIDE_ROWS rows has less than 6. */
AVX512 static void wide_later_rows(WIDE_ARGUMENTS) {
    switch (rows) {
        WIDE_CASE(6, FLOAT32, 0)
        WIDE_CASE(7, FLOAT32, 0)
        WIDE_CASE(8, FLOAT32, 0)
        WIDE_CASE(9, FLOAT32, 0)
        WIDE_CASE(10, FLOAT32, 0)
        WIDE_CASE(11, FLOAT32, 0)
        WIDE_CASE(12, FLOAT32, 0)
    }
}

typedef void WideBlock(WIDE_ARGUMENTS);

/* Write ``inputs`` inputs of a tile of 16 bits as float32 into ``panel``. */
AVX512 static void widen(const char* weight, const int type, size_t inputs, float* panel) {
    for (size_t i = 0; i < inputs; i++, weight += COLUMNS * 2, panel += COLUMNS) {
        _mm_prefetch(weight + AHEAD, _MM_HINT_T0);
        _mm512_storeu_ps(panel, type == FLOAT16 ? load_tile(weight, FLOAT16) : load_tile(weight, BFLOAT16));
    }
}

/* Compute the same bits as rows_avx2. It stays where it was measured as fast or faster: for a lone row, which waits for
 * the memory, and for two rows of weights in 16 bits. Many rows read those as float32. */
AVX512 static void rows_avx512(const Call* call, size_t first, size_t last, size_t row, size_t end) {
    const int type = call->type;
    const size_t inner = call->inner, count = end - row, blocks = count_of(count, WIDE_ROWS);
    if (count == 1 || (type != FLOAT32 && count == 2)) {
        rows_avx2(call, first, last, row, end);
        return;
    }
    const int widens = type != FLOAT32 && blocks > 1;
    WideBlock* first_rows = widens            ? wide_later_rows
                            : type == FLOAT32 ? wide_first_rows_float32
                            : type == FLOAT16 ? wide_first_rows_float16
                                              : wide_first_rows_bfloat16;
    const size_t part = blocks == 1 ? inner : count_of(inner, count_of(inner, WIDE_PART));
    const size_t bytes = COLUMNS * size_of(type);
    float panel[2 * WIDE_PART * COLUMNS];
    for (size_t tile = first; tile < last; tile += 2)
        for (size_t begin = 0; begin < inner; begin += part) {
            const size_t stop = begin + part < inner ? begin + part : inner, inputs = stop - begin;
            const char* weight = (const char*)call->weight + (tile * inner + begin) * bytes;
            size_t next = last - tile > 1 ? inner * bytes : 0;
            if (widens) {
                widen(weight, type, inputs, panel);
                if (next) widen(weight + next, type, inputs, panel + inputs * COLUMNS);
                weight = (const char*)panel;
                next = next ? inputs * COLUMNS * sizeof(float) : 0;
            }
            for (size_t r = row, left = blocks; left; left--) {
                const size_t rows = count_of(end - r, left);
                (r == row ? first_rows : wide_later_rows)(call, weight, next, tile, r, rows, begin, stop);
                r += rows;
            }
        }
}
#endif /* NO_AVX512 */
#endif /* x86-64 */

/* ---- the custom operator ---- */

typedef struct {
    OrtApi api;
    int64_t width;
    void (*multiply)(const Call*, size_t first, size_t last, size_t row, size_t end);
} Kernel;

typedef struct {
    const Kernel* kernel;
    const Call* call;
} Work;

static void multiply_item(void* work, size_t item) {
    const Work* w = work;
    const Part part = part_of(item, count_of(w->call->width, COLUMNS), TILES, w->call->rows, ROWS);
    w->kernel->multiply(w->call, part.first, part.last, part.row, part.end);
}

static OrtStatus* compute(void* self, void* context) {
    const Kernel* kernel = self;
    OrtApi api = kernel->api;
    OrtStatus* status = NULL;
    void *output = NULL, *made = NULL;
    Input x = {0}, weight = {0};
    TRY(read_input(api, context, 0, MOST_DIMENSIONS, &x));
    TRY(read_input(api, context, 1, 2, &weight));
    Call call = {.x = x.data, .weight = weight.data, .type = weight.type};
    call.inner = (size_t)x.dims[x.rank - 1];
    call.width = (size_t)kernel->width;
    call.rows = rows_of(x.dims, x.rank);
    const size_t tiles = count_of(call.width, COLUMNS);
    if ((size_t)weight.dims[0] < tiles || (size_t)weight.dims[1] != call.inner * COLUMNS) {
        status = failure(api, "tiled_matmul: the shapes of the inputs do not fit");
        goto done;
    }
    if (call.type != FLOAT32 && call.type != FLOAT16 && call.type != BFLOAT16) {
        status = failure(api, "tiled_matmul: weight must be float32, float16 or bfloat16");
        goto done;
    }
    x.dims[x.rank - 1] = kernel->width;
    TRY(API(OUTPUT, OrtStatus*, void*, size_t, const int64_t*, size_t, void**)(context, 0, x.dims, x.rank, &output));
    if (call.rows == 0) goto done;
    TRY(API(TENSOR_DATA, OrtStatus*, const void*, void**)(output, &made));
    call.out = made;
    Work work = {kernel, &call};
    TRY(parallel(api, context, multiply_item, count_of(tiles, TILES) * count_of(call.rows, ROWS), &work));
done:
    return status;
}

static OrtStatus* init(OrtApi api, const void* info, void* made) {
    OrtStatus* status = NULL;
    Kernel* kernel = made;
    *kernel = (Kernel){api, 0, rows_portable};
#if defined(__x86_64__) && !defined(PORTABLE)
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c")) {
        kernel->multiply = rows_avx2;
#ifndef NO_AVX512
        if (__builtin_cpu_supports("avx512f")) kernel->multiply = rows_avx512;
#endif
    }
#endif
    TRY(read_integer(api, info, "width", &kernel->width));
    if (kernel->width < 1) status = failure(api, "tiled_matmul: width must be positive");
done:
    return status;
}

const OwnOperator tiled_matmul = {
    SEEN, .name = "tiled_matmul", .inputs = 2, .outputs = 1, .input_types = {FLOAT, ANY_TYPE},
};
