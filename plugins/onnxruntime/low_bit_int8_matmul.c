/* The operator low_bit_int8_matmul as a custom operator of onnxruntime: x @ w.T for weights of 4, 5, 6 or 8 bits and
 * inputs rounded to 8 bits (plugins/reference/low_bit_int8.py defines both).
 *
 * A row has the same bits in any call, with AVX2 and with AVX-512: sums of 32 products, or 16 with 6 bits, are exact
 * integers, and every row adds these sums in the same order by the same operations. Rows share the unpacking of a
 * weight.
 */
#pragma GCC optimize("O1") /* its loops are written out: higher levels take twice as long for code as fast */
#include <math.h>
#include <string.h>

#include "custom_operator.h"

#define COLUMNS 8 /* outputs of a tile */
#define STEP 32   /* inputs whose products are summed as integers; they share the scale of x */
#define STEP_BYTES(bits) ((size_t)(COLUMNS * STEP / 8 * (bits))) /* of a tile */
#define PARTS(bits) ((bits) == 6 ? (size_t)2 : (size_t)1)        /* of a step, which may be in different groups */
#define MIDDLE(bits) ((float)(1 << ((bits) - 1)))                /* the zero point of weights that store none */
#define INPUTS 8                                                 /* of the operator */
#define TABLE 7                                                  /* the input with the table */
#define ENTRIES 16                                               /* of it */
#define TILES 8                                                  /* tiles of an item, which one thread computes */
#define ROWS 32              /* its rows: the rounded inputs of few rows stay in the nearest cache */
#define ROUNDED_AT_ONCE 8192 /* inputs from which on several threads round them */
#define TINY 1e-30f          /* a step whose largest input is not above counts as zeros */

/* STEP inputs of a row, rounded to 8 bits, and the sums of their integers: of the first half, the second, and both.
 * ``scaled_sums``: these times the scale. ``starts``: these times minus the zero point of weights that store none. */
typedef struct {
    int8_t integers[STEP];
    float scale, sums[3], scaled_sums[3];
    int32_t starts[3];
} Rounded;
#define SUM_OF(parts, part) ((parts) == 1 ? (size_t)2 : (part))

typedef struct {
    const float* x;
    const uint8_t* weight;                /* [tiles, steps, STEP_BYTES] */
    const float* scales;                  /* [tiles, scales_of_output, COLUMNS] */
    const uint8_t* zeros;                 /* [tiles, groups, COLUMNS]; NULL: MIDDLE, or none if there are offsets */
    const float* offsets;                 /* as scales, or NULL */
    const int8_t *subscales, *suboffsets; /* [tiles, groups, COLUMNS], or NULL */
    const uint8_t* table;                 /* [ENTRIES], integers of 8 bits that those of 4 bits choose among; or NULL */
    float* out;
    Rounded* rounded; /* [rows, steps] */
    size_t rows, inner, width, bits, wide, steps, groups, parts_of_group, scales_of_output, groups_of_scale;
} Call;

/* ---- portable ---- */

/* Fill in what follows from the sums of the two halves and the scale. */
static void complete(const Call* call, Rounded* rounded) {
    const float zero = call->zeros || call->offsets ? 0.0f : MIDDLE(call->wide);
    rounded->sums[2] = rounded->sums[0] + rounded->sums[1];
    for (int i = 0; i < 3; i++) {
        rounded->scaled_sums[i] = rounded->sums[i] * rounded->scale;
        rounded->starts[i] = (int32_t)(-zero * rounded->sums[i]);
    }
}

static void round_row(const Call* call, size_t row) {
    const float* x = call->x + row * call->inner;
    for (size_t step = 0; step < call->steps; step++) {
        Rounded* rounded = call->rounded + row * call->steps + step;
        size_t begin = step * STEP;
        size_t count = call->inner - begin < STEP ? call->inner - begin : STEP;
        float largest = 0.0f, nothing = 0.0f, inverse;
        int32_t sums[2] = {0};
        for (size_t i = 0; i < count; i++) {
            float size = fabsf(x[begin + i]);
            largest = size > largest ? size : largest;
            nothing += x[begin + i] * 0.0f; /* NaN if an input is not finite */
        }
        inverse = largest > TINY && nothing == 0.0f ? 127.0f / largest : 0.0f;
        memset(rounded->integers, 0, STEP);
        for (size_t i = 0; i < count && inverse != 0.0f; i++) {
            rounded->integers[i] = (int8_t)lrintf(x[begin + i] * inverse);
            sums[i / 16] += rounded->integers[i];
        }
        rounded->scale = inverse != 0.0f ? largest / 127.0f : nothing;
        rounded->sums[0] = (float)sums[0];
        rounded->sums[1] = (float)sums[1];
        complete(call, rounded);
    }
}

/* Return the integer of input ``i`` of a step, for output ``column`` of a tile. */
static int32_t integer_at(const Call* call, const uint8_t* weight, size_t i, size_t column) {
    const size_t bits = call->bits;
    const size_t run = i / 4, byte = column * 4 + i % 4; /* runs of four inputs have 32 bytes */
    if (bits == 8) return weight[run * 32 + byte];
    int32_t integer = weight[run / 2 * 32 + byte] >> run % 2 * 4 & 15;
    if (bits > 4) {
        const size_t more = bits - 4, runs = 8 / more; /* of a plane */
        const int32_t plane = weight[128 + run / runs * 32 + byte];
        integer |= (plane >> run % runs * more & ((1 << more) - 1)) << 4;
    }
    return call->table ? call->table[integer] : integer;
}

static float multiply_add(float a, float b, float c) {
#ifdef FP_FAST_FMAF
    return fmaf(a, b, c);
#else
    return c + a * b;
#endif
}

static void row_portable(const Call* call, size_t tile, size_t row) {
    const size_t parts = PARTS(call->bits), inputs = STEP / parts;
    float out[COLUMNS];
    for (size_t column = 0; column < COLUMNS; column++) {
        const uint8_t* weight = call->weight + tile * call->steps * STEP_BYTES(call->bits);
        float all = 0.0f;
        for (size_t part = 0; part < call->steps * parts; part++) {
            const Rounded* x = call->rounded + row * call->steps + part / parts;
            const size_t of_tile = part / call->parts_of_group,
                         group = (tile * call->groups + of_tile) * COLUMNS + column;
            const size_t outer = (tile * call->scales_of_output + of_tile / call->groups_of_scale) * COLUMNS + column;
            const size_t sum = SUM_OF(parts, part % parts);
            int32_t exact = 0;
            for (size_t i = part % parts * inputs; i < part % parts * inputs + inputs; i++)
                exact += integer_at(call, weight + part / parts * STEP_BYTES(call->bits), i, column) * x->integers[i];
            float zero = call->zeros ? (float)call->zeros[group] : call->offsets ? 0.0f : MIDDLE(call->wide);
            float number = (float)exact - zero * x->sums[sum]; /* exact */
            float scale = call->scales[outer] * (call->subscales ? (float)call->subscales[group] : 1.0f);
            all = multiply_add(number, scale * x->scale, all);
            if (call->offsets) {
                float offset = call->offsets[outer] * (call->suboffsets ? (float)call->suboffsets[group] : 1.0f);
                all = multiply_add(offset, x->scaled_sums[sum], all);
            }
        }
        out[column] = all;
    }
    size_t begin = tile * COLUMNS, left = call->width - begin;
    memcpy(call->out + row * call->width + begin, out, sizeof(float) * (left < COLUMNS ? left : COLUMNS));
}

static void rows_portable(const Call* call, size_t first, size_t last, size_t row, size_t end) {
    for (size_t tile = first; tile < last; tile++)
        for (size_t r = row; r < end; r++) row_portable(call, tile, r);
}

/* ---- vectors ---- */

#define INLINE __attribute__((always_inline)) static inline
#define UNROLL _Pragma("GCC unroll 8") /* else arrays of vectors do not stay in registers */
#define LANES_OF(type, x) ((x) - (type){0})

INLINE uint32_t load_word(const int8_t* at) {
    uint32_t word;
    memcpy(&word, at, sizeof(word));
    return word;
}

/* ---- x86-64 ---- */

#if defined(__x86_64__) && !defined(PORTABLE)
#include <immintrin.h>
#define AVX2 __attribute__((target("avx2,fma")))

AVX2 static void round_row_avx2(const Call* call, size_t row) {
    const float* x = call->x + row * call->inner;
    const __m256 sign = _mm256_set1_ps(-0.0f), none = _mm256_setzero_ps();
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    float last[STEP];
    for (size_t step = 0; step < call->steps; step++, x += STEP) {
        Rounded* rounded = call->rounded + row * call->steps + step;
        size_t left = call->inner - step * STEP;
        const float* from = x;
        if (left < STEP) {
            memset(last, 0, sizeof(last));
            memcpy(last, x, left * sizeof(float));
            from = last;
        }
        __m256 v[4], largest = none, nothing = none;
        for (int i = 0; i < 4; i++) {
            v[i] = _mm256_loadu_ps(from + 8 * i);
            largest = _mm256_max_ps(largest, _mm256_andnot_ps(sign, v[i]));
            nothing = _mm256_fmadd_ps(v[i], none, nothing);
        }
        __m128 most = _mm_max_ps(_mm256_castps256_ps128(largest), _mm256_extractf128_ps(largest, 1));
        most = _mm_max_ps(most, _mm_movehl_ps(most, most));
        most = _mm_max_ss(most, _mm_movehdup_ps(most));
        float top = _mm_cvtss_f32(most);
        int finite = _mm256_movemask_ps(_mm256_cmp_ps(nothing, none, _CMP_EQ_OQ)) == 255;
        float inverse = top > TINY && finite ? 127.0f / top : 0.0f;
        __m256i* integers = (__m256i*)rounded->integers;
        if (inverse == 0.0f) {
            _mm256_storeu_si256(integers, _mm256_setzero_si256());
            rounded->scale = finite ? 0.0f : NAN;
            memset(rounded->sums, 0, sizeof(rounded->sums));
            complete(call, rounded);
            continue;
        }
        __m256i whole[4];
        for (int i = 0; i < 4; i++) whole[i] = _mm256_cvtps_epi32(_mm256_mul_ps(v[i], _mm256_set1_ps(inverse)));
        __m256i pairs = _mm256_hadd_epi32(_mm256_add_epi32(whole[0], whole[1]), _mm256_add_epi32(whole[2], whole[3]));
        __m128i halves = _mm_add_epi32(_mm256_castsi256_si128(pairs), _mm256_extracti128_si256(pairs, 1));
        halves = _mm_hadd_epi32(halves, halves); /* the sum of the first half, and that of the second */
        __m256i words =
            _mm256_packs_epi16(_mm256_packs_epi32(whole[0], whole[1]), _mm256_packs_epi32(whole[2], whole[3]));
        _mm256_storeu_si256(integers, _mm256_permutevar8x32_epi32(words, order));
        rounded->scale = top / 127.0f;
        rounded->sums[0] = (float)_mm_cvtsi128_si32(halves);
        rounded->sums[1] = (float)_mm_extract_epi32(halves, 1);
        complete(call, rounded);
    }
}

typedef uint32_t Words8 __attribute__((vector_size(32)));
typedef uint32_t Words16 __attribute__((vector_size(64)));

AVX2 INLINE __m256i load_words(const uint8_t* at) { return _mm256_loadu_si256((const __m256i*)at); }
AVX2 INLINE __m256i load_table(const uint8_t* at) {
    return _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)at));
}
AVX2 INLINE __m256 load_floats(const float* at) { return _mm256_loadu_ps(at); }
AVX2 INLINE __m256 bytes_as_floats(const uint8_t* at) {
    return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)at)));
}
AVX2 INLINE __m256 integers_as_floats(const int8_t* at) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)at)));
}
/* Return the sums of products of two pairs of inputs, in 16 bits: weights have at most 6 bits. */
AVX2 INLINE __m256i products(Words8 low, Words8 first, Words8 high, Words8 second) {
    const __m256i one = _mm256_maddubs_epi16((__m256i)low, (__m256i)first);
    return _mm256_add_epi16(one, _mm256_maddubs_epi16((__m256i)high, (__m256i)second));
}
/* Add the products of a step's next eight inputs. 16 bits are enough for 4 bits: a step adds 16 products of at most
 * 15 * 128. The halves of 8 bits are multiplied one after the other. */
AVX2 INLINE Words8 add_pair(Words8 sums, Words8 low, Words8 first, Words8 high, Words8 second, int bits) {
    const Words8 half = (Words8){0} + 0x0f0f0f0f;
    const __m256i lower =
        bits == 8 ? products(low & half, first, high & half, second) : products(low, first, high, second);
    if (bits == 4) return (Words8)_mm256_add_epi16((__m256i)sums, lower);
    sums = (Words8)_mm256_add_epi32((__m256i)sums, _mm256_madd_epi16(lower, _mm256_set1_epi16(1)));
    if (bits < 8) return sums;
    const __m256i upper = products(low >> 4 & half, first, high >> 4 & half, second);
    return (Words8)_mm256_add_epi32((__m256i)sums, _mm256_madd_epi16(upper, _mm256_set1_epi16(16)));
}
AVX2 INLINE __m256 whole(Words8 sums, int bits) {
    return _mm256_cvtepi32_ps(bits == 4 ? _mm256_madd_epi16((__m256i)sums, _mm256_set1_epi16(1)) : (__m256i)sums);
}

#define NAME(function) function##_avx2
#define TARGET AVX2
#define VECTOR_COLUMNS 8
#define MOST_ROWS 4 /* whose sums fit into the registers */
#define FLOATS __m256
#define WORDS Words8
#define JOIN(type, low, high) ((type)(low))
#define PREFETCH(at) (void)0
#define STARTS_AT_MIDDLE 0 /* the sums of 4 bits have too few bits for it */
#define START(rounded, sum, bits) (WORDS){0}
#define LOOK_UP(table, at) ((Words8)_mm256_shuffle_epi8((__m256i)(table), (__m256i)(at)))
#define ADD_PAIR(sums, low, first, high, second, bits) add_pair(sums, low, first, high, second, bits)
#define WHOLE(sums, bits) whole(sums, bits)
#define MULTIPLY_ADD(a, b, c) _mm256_fmadd_ps(a, b, c)
#include "low_bit_int8_rows.h"

#ifndef NO_AVX512
#undef NAME
#undef TARGET
#undef VECTOR_COLUMNS
#undef MOST_ROWS
#undef FLOATS
#undef WORDS
#undef JOIN
#undef PREFETCH
#undef STARTS_AT_MIDDLE
#undef START
#undef LOOK_UP
#undef ADD_PAIR
#undef WHOLE
#undef MULTIPLY_ADD
#define NAME(function) function##_avx512
#define TARGET __attribute__((target("avx512f,avx512bw,avx512vnni,fma")))
#define VECTOR_COLUMNS 16
#define MOST_ROWS 8
#define FLOATS __m512
#define WORDS Words16
#define JOIN(type, low, high) ((type)_mm512_inserti64x4(_mm512_castsi256_si512((__m256i)(low)), (__m256i)(high), 1))
#define PREFETCH(at) _mm_prefetch(at, _MM_HINT_T1) /* the processor's own prefetches do not follow two tiles */
#define STARTS_AT_MIDDLE 1
#define START(rounded, sum, bits) ((Words16)_mm512_set1_epi32((rounded)->starts[sum]))
#define LOOK_UP(table, at) ((Words16)_mm512_shuffle_epi8((__m512i)(table), (__m512i)(at)))
#define DOT(sums, weights, x) _mm512_dpbusd_epi32((__m512i)(sums), (__m512i)(weights), (__m512i)(x))
#define ADD_PAIR(sums, low, first, high, second, bits) ((Words16)DOT(DOT(sums, low, first), high, second))
#define WHOLE(sums, bits) _mm512_cvtepi32_ps((__m512i)(sums))
#define MULTIPLY_ADD(a, b, c) _mm512_fmadd_ps(a, b, c)
#include "low_bit_int8_rows.h"
#endif /* NO_AVX512 */
#endif /* x86-64 */

/* ---- aarch64 ---- */

#if defined(__aarch64__) && !defined(PORTABLE)
#include <arm_neon.h>
#ifdef __linux__
#include <sys/auxv.h>
#endif
#ifdef __clang__
#define DOT_PRODUCTS __attribute__((target("dotprod")))
#else
#define DOT_PRODUCTS __attribute__((target("arch=armv8.2-a+dotprod")))
#endif

static int has_dot_products(void) {
#ifdef __linux__
    return getauxval(AT_HWCAP) >> 20 & 1; /* HWCAP_ASIMDDP */
#else
    return 1; /* Apple's processors have them */
#endif
}

INLINE uint32x4_t load_words(const uint8_t* at) { return vreinterpretq_u32_u8(vld1q_u8(at)); }
INLINE uint32x4_t load_table(const uint8_t* at) { return load_words(at); }
INLINE float32x4_t load_floats(const float* at) { return vld1q_f32(at); }
INLINE float32x4_t bytes_as_floats(const uint8_t* at) {
    const uint8x8_t four = vcreate_u8(load_word((const int8_t*)at));
    return vcvtq_f32_u32(vmovl_u16(vget_low_u16(vmovl_u8(four))));
}
INLINE float32x4_t integers_as_floats(const int8_t* at) {
    const int8x8_t four = vcreate_s8(load_word(at));
    return vcvtq_f32_s32(vmovl_s16(vget_low_s16(vmovl_s8(four))));
}
/* Add the products of a step's next eight inputs. 8 bits count from their middle here, and START adds it back. */
DOT_PRODUCTS INLINE uint32x4_t add_dots(uint32x4_t sums, uint32x4_t low, uint32x4_t first, uint32x4_t high,
                                        uint32x4_t second, int bits) {
    const uint32_t middle = bits == 8 ? 0x80808080 : 0;
    const int8x16_t lower = vreinterpretq_s8_u32(low ^ middle), upper = vreinterpretq_s8_u32(high ^ middle);
    int32x4_t all = vdotq_s32(vreinterpretq_s32_u32(sums), lower, vreinterpretq_s8_u32(first));
    all = vdotq_s32(all, upper, vreinterpretq_s8_u32(second));
    return vreinterpretq_u32_s32(all);
}
INLINE uint32x4_t start_of(const Rounded* rounded, size_t sum, int bits) {
    const int32_t middles = bits == 8 ? (int32_t)(MIDDLE(bits) * rounded->sums[sum]) : 0;
    return vreinterpretq_u32_s32(vdupq_n_s32(rounded->starts[sum] + middles));
}

#define NAME(function) function##_neon
#define TARGET DOT_PRODUCTS
#define VECTOR_COLUMNS 4
#define MOST_ROWS 8
#define FLOATS float32x4_t
#define WORDS uint32x4_t
#define JOIN(type, low, high) (low)
#define PREFETCH(at) __builtin_prefetch(at)
#define STARTS_AT_MIDDLE 1
#define START(rounded, sum, bits) start_of(rounded, sum, bits)
#define LOOK_UP(table, at) vreinterpretq_u32_u8(vqtbl1q_u8(vreinterpretq_u8_u32(table), vreinterpretq_u8_u32(at)))
#define ADD_PAIR(sums, low, first, high, second, bits) add_dots(sums, low, first, high, second, bits)
#define WHOLE(sums, bits) vcvtq_f32_s32(vreinterpretq_s32_u32(sums))
#define MULTIPLY_ADD(a, b, c) vfmaq_f32(c, a, b)
#include "low_bit_int8_rows.h"
#endif /* aarch64 */

typedef struct {
    OrtApi api;
    int64_t bits, group_size, width;
    void (*round)(const Call*, size_t);
    void (*multiply)(const Call*, size_t first, size_t last, size_t row, size_t end);
} Kernel;

typedef struct {
    const Kernel* kernel;
    const Call* call;
} Work;

static void round_item(void* work, size_t row) {
    const Work* w = work;
    w->kernel->round(w->call, row);
}

static void multiply_item(void* work, size_t item) {
    const Work* w = work;
    const Part part = part_of(item, count_of(w->call->width, COLUMNS), TILES, w->call->rows, ROWS);
    w->kernel->multiply(w->call, part.first, part.last, part.row, part.end);
}

static OrtStatus* compute(void* self, void* context) {
    const Kernel* kernel = self;
    OrtApi api = kernel->api;
    OrtStatus* status = NULL;
    void *output = NULL, *made = NULL, *scratch = NULL;
    Input inputs[INPUTS] = {0}, *x = inputs;
    size_t count = 0;
    TRY(API(INPUT_COUNT, OrtStatus*, void*, size_t*)(context, &count));
    for (size_t i = 0; i < count && i < INPUTS; i++)
        TRY(read_input(api, context, i, i ? 2 : MOST_DIMENSIONS, &inputs[i]));
    Call call = {.x = x->data, .weight = inputs[1].data, .scales = inputs[2].data, .zeros = inputs[3].data};
    call.offsets = inputs[4].data;
    call.subscales = inputs[5].data;
    call.suboffsets = inputs[6].data;
    call.table = inputs[TABLE].data;
    call.inner = (size_t)x->dims[x->rank - 1];
    call.width = (size_t)kernel->width;
    call.bits = (size_t)kernel->bits;
    call.wide = call.table ? 8 : call.bits;
    call.steps = count_of(call.inner, STEP);
    call.groups = count_of(call.steps * STEP, (size_t)kernel->group_size);
    call.parts_of_group = (size_t)kernel->group_size * PARTS(call.bits) / STEP;
    call.scales_of_output = (size_t)inputs[2].dims[1] / COLUMNS;
    call.groups_of_scale = call.scales_of_output ? count_of(call.groups, call.scales_of_output) : 1;
    call.rows = rows_of(x->dims, x->rank);
    const size_t tiles = count_of(call.width, COLUMNS), steps = call.rows * call.steps;
    const size_t sizes[INPUTS] = {
        0,
        call.steps * STEP_BYTES(call.bits),
        call.scales_of_output * COLUMNS,
        call.groups * COLUMNS,
        call.scales_of_output * COLUMNS,
        call.groups * COLUMNS,
        call.groups * COLUMNS,
    };
    int fit = call.groups == call.groups_of_scale * call.scales_of_output;
    fit &= !call.table || (call.bits == 4 && inputs[TABLE].rank == 1 && inputs[TABLE].dims[0] == ENTRIES);
    for (size_t i = 1; i < TABLE; i++)
        fit &= !inputs[i].rank || ((size_t)inputs[i].dims[0] == tiles && (size_t)inputs[i].dims[1] == sizes[i]);
    if (!fit) {
        status = failure(api, "low_bit_int8_matmul: the shapes of the inputs do not fit");
        goto done;
    }
    x->dims[x->rank - 1] = kernel->width;
    TRY(API(OUTPUT, OrtStatus*, void*, size_t, const int64_t*, size_t, void**)(context, 0, x->dims, x->rank, &output));
    if (steps == 0) goto done;
    TRY(API(TENSOR_DATA, OrtStatus*, const void*, void**)(output, &made));
    call.out = made;
    scratch = malloc(steps * sizeof(Rounded));
    if (scratch == NULL) {
        status = failure(api, "low_bit_int8_matmul: out of memory");
        goto done;
    }
    call.rounded = scratch;
    Work work = {kernel, &call};
    if (call.rows * call.inner >= ROUNDED_AT_ONCE) {
        TRY(parallel(api, context, round_item, call.rows, &work));
    } else {
        for (size_t row = 0; row < call.rows; row++) round_item(&work, row);
    }
    TRY(parallel(api, context, multiply_item, count_of(tiles, TILES) * count_of(call.rows, ROWS), &work));
done:
    free(scratch);
    return status;
}

static OrtStatus* init(OrtApi api, const void* info, void* made) {
    OrtStatus* status = NULL;
    Kernel* kernel = made;
    *kernel = (Kernel){api, 0, 0, 0, round_row, rows_portable};
#if defined(__x86_64__) && !defined(PORTABLE)
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
        kernel->round = round_row_avx2;
        kernel->multiply = rows_avx2;
#ifndef NO_AVX512
        if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
            __builtin_cpu_supports("avx512vnni"))
            kernel->multiply = rows_avx512;
#endif
    }
#elif defined(__aarch64__) && !defined(PORTABLE)
    if (has_dot_products()) kernel->multiply = rows_neon;
#endif
    TRY(read_integer(api, info, "bits", &kernel->bits));
    TRY(read_integer(api, info, "group_size", &kernel->group_size));
    TRY(read_integer(api, info, "width", &kernel->width));
    if (kernel->bits < 4 || kernel->bits == 7 || kernel->bits > 8 || kernel->width < 1)
        status = failure(api, "low_bit_int8_matmul: bits must be 4, 5, 6 or 8, and width positive");
    else if (kernel->group_size < 1 || kernel->group_size % (int64_t)(STEP / PARTS(kernel->bits)))
        status = failure(api, "low_bit_int8_matmul: group_size must be a multiple of 32, or of 16 with 6 bits");
done:
    return status;
}

const OwnOperator low_bit_int8_matmul = {
    SEEN,
    .name = "low_bit_int8_matmul",
    .inputs = INPUTS,
    .optional_inputs = 5,
    .outputs = 1,
    .input_types = {FLOAT, UINT8, FLOAT, UINT8, FLOAT, INT8, INT8, UINT8},
};
