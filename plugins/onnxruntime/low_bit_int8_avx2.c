/* Rows of low_bit_int8_matmul with AVX2. */
#if defined(__x86_64__) && !defined(PORTABLE)
#include "low_bit_int8_loads.h"

AVX2 void low_bit_int8_round_avx2(const Call* call, size_t row) {
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

#define NAME(function) low_bit_int8_##function##_avx2
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
#endif
