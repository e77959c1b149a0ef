/* Rows of low_bit_int8_matmul with AVX2. */
#if defined(__x86_64__) && !defined(PORTABLE)
#include "low_bit_int8_loads.h"

/* The pass copies code of blocks for each case: a quarter of the time to compile, for code as fast. */
#pragma GCC optimize("no-tree-dominator-opts")

AVX2 void low_bit_int8_round_avx2(const Call* call, size_t row) {
    const float* x = call->x + row * call->inner;
    const __m256 sign = _mm256_set1_ps(-0.0f), none = _mm256_setzero_ps();
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    const char center = call->bits == 4 && (call->zeros || call->offsets) ? 0 : (char)(1 << (call->bits - 1) & 63);
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
            memset(rounded->pairs, 0, sizeof(rounded->pairs));
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
        __m256i starts = _mm256_maddubs_epi16(_mm256_set1_epi8(center), _mm256_loadu_si256(integers));
        starts = _mm256_add_epi16(starts, _mm256_shuffle_epi32(starts, 0x4e));
        starts = _mm256_sub_epi16(_mm256_setzero_si256(), _mm256_add_epi16(starts, _mm256_shuffle_epi32(starts, 0xb1)));
        const __m128i first = _mm256_castsi256_si128(starts), second = _mm256_extracti128_si256(starts, 1);
        rounded->pairs[0] = _mm_cvtsi128_si32(first);
        rounded->pairs[1] = _mm_cvtsi128_si32(second);
        rounded->pairs[2] = _mm_cvtsi128_si32(_mm_add_epi16(first, second));
        rounded->scale = top / 127.0f;
        rounded->sums[0] = (float)_mm_cvtsi128_si32(halves);
        rounded->sums[1] = (float)_mm_extract_epi32(halves, 1);
        complete(call, rounded);
    }
}

/* Where a block reads the values of the groups of one or two tiles, and what they are. */
typedef struct {
    const float *scales, *offsets;
    const int8_t *subscales, *suboffsets;
    const uint8_t* zeros;
    size_t next_outer, next, left_in_scale; /* ``next``: from the values of the first tile to those of the second */
    __m256 outer_scale[2], outer_offset[2], scale[2], offset[2], middle[2];
} Values;

/* Read the values of the next group. ``center``: what the sums have subtracted already. */
AVX2 INLINE void read_group(const Call* call, Values* v, float center) {
    if (v->left_in_scale == 0) {
        v->left_in_scale = call->groups_of_scale;
        v->outer_scale[0] = load_floats(v->scales);
        v->outer_scale[1] = load_floats(v->scales + v->next_outer);
        v->scales += COLUMNS;
        if (call->offsets) {
            v->outer_offset[0] = load_floats(v->offsets);
            v->outer_offset[1] = load_floats(v->offsets + v->next_outer);
            v->offsets += COLUMNS;
        }
    }
    v->left_in_scale--;
    v->scale[0] = v->outer_scale[0], v->scale[1] = v->outer_scale[1];
    v->offset[0] = v->outer_offset[0], v->offset[1] = v->outer_offset[1];
    if (call->subscales) {
        v->scale[0] *= integers_as_floats(v->subscales);
        v->scale[1] *= integers_as_floats(v->subscales + v->next);
        v->subscales += COLUMNS;
    }
    if (call->suboffsets) {
        v->offset[0] *= integers_as_floats(v->suboffsets);
        v->offset[1] *= integers_as_floats(v->suboffsets + v->next);
        v->suboffsets += COLUMNS;
    }
    if (call->zeros) {
        v->middle[0] = center - bytes_as_floats(v->zeros);
        v->middle[1] = center - bytes_as_floats(v->zeros + v->next);
        v->zeros += COLUMNS;
    }
}

/* Unpack the weights of four inputs, which are the first or second ones of pair ``pair`` of a step. ``plane``: further
 * bits, of which those of earlier pairs are gone. */
AVX2 INLINE __m256i unpack(const uint8_t* weight, size_t pair, const int second, const int bits, __m256i* plane) {
    if (bits == 8) return load_words(weight + 64 * pair + 32 * second);
    __m256i words = load_words(weight + 32 * pair);
    if (second) words = _mm256_srli_epi16(words, 4);
    words = _mm256_and_si256(words, _mm256_set1_epi8(15));
    if (bits > 4) {
        const __m256i more = _mm256_slli_epi16(*plane, second ? 8 - bits : 4);
        words = _mm256_or_si256(words, _mm256_and_si256(more, _mm256_set1_epi8(bits == 5 ? 16 : 48)));
        if (second) *plane = _mm256_srli_epi16(*plane, 2 * (bits - 4));
    }
    return words;
}

#define TILES_OF(wide) ((wide) == 8 ? 1 : 2) /* of a block */
#define MOST_ROWS 6                          /* whose sums of two tiles fit into the registers */
/* A sum of integers, in the register of its name. Without it gcc keeps some in memory, and copies others. */
#ifdef __clang__
#define IN_REGISTER(sum, name) __m256i sum
#else
#define IN_REGISTER(sum, name) register __m256i sum __asm__(name)
#endif
#define KEEP(sum) __asm__("" : "+x"(sum)) /* in the order of the source, which needs the fewest registers */
#define A_0 "xmm0"
#define B_0 "xmm1"
#define A_1 "xmm2"
#define B_1 "xmm3"
#define A_2 "xmm4"
#define B_2 "xmm5"
#define A_3 "xmm6"
#define B_3 "xmm7"
#define A_4 "xmm8"
#define B_4 "xmm9"
#define A_5 "xmm10"
#define B_5 "xmm11"

#define EACH_1(do) \
    do (0)
#define EACH_2(do) EACH_1(do) do(1)
#define EACH_3(do) EACH_2(do) do(2)
#define EACH_4(do) EACH_3(do) do(3)
#define EACH_5(do) EACH_4(do) do(4)
#define EACH_6(do) EACH_5(do) do(5)
#define NAME block_1
#define EACH EACH_1
#include "low_bit_int8_block.h"
#define NAME block_2
#define EACH EACH_2
#include "low_bit_int8_block.h"
#define NAME block_3
#define EACH EACH_3
#include "low_bit_int8_block.h"
#define NAME block_4
#define EACH EACH_4
#include "low_bit_int8_block.h"
#define NAME block_5
#define EACH EACH_5
#include "low_bit_int8_block.h"
#define NAME block_6
#define EACH EACH_6
#include "low_bit_int8_block.h"

#define CASE(rows) \
    case rows: block_##rows(call, tile, r, bits, by_table); break;

AVX2 INLINE void blocks(const Call* call, size_t first, size_t last, size_t row, size_t end, const int bits,
                        const int by_table) {
    for (size_t tile = first; tile < last; tile += TILES_OF(by_table ? 8 : bits))
        for (size_t r = row, left = count_of(end - row, MOST_ROWS), rows; left; left--, r += rows) {
            rows = count_of(end - r, left); /* blocks of about equal size */
            switch (rows) {
                CASE(1)
                CASE(2)
                CASE(3)
                CASE(4)
                CASE(5)
                CASE(6)
            }
        }
}

AVX2 void low_bit_int8_rows_avx2(const Call* call, size_t first, size_t last, size_t row, size_t end) {
    ROWS_BY(blocks)
}
#endif
