/* Rows of low_bit_int8_matmul with AVX-512 and its products of 8 bits. */
#if defined(__x86_64__) && !defined(PORTABLE) && !defined(NO_AVX512)
#include <cpuid.h>
#include <immintrin.h>

#include "low_bit_int8_loads.h"

typedef uint32_t Words16 __attribute__((vector_size(64)));

#define NAME(function) low_bit_int8_##function##_avx512
#define TARGET __attribute__((target("avx512f,avx512bw,avx512vnni,fma")))
#define VECTOR_COLUMNS 16
#define FLOATS __m512
#define WORDS Words16
#define JOIN(type, low, high) ((type)_mm512_inserti64x4(_mm512_castsi256_si512((__m256i)(low)), (__m256i)(high), 1))
#define PREFETCH(at) _mm_prefetch(at, _MM_HINT_T1) /* the processor's own prefetches do not follow two tiles */
#define START(rounded, sum, bits) ((Words16)_mm512_set1_epi32((rounded)->starts[sum]))
#define LOOK_UP(table, at) ((Words16)_mm512_shuffle_epi8((__m512i)(table), (__m512i)(at)))
#define DOT(sums, weights, x) _mm512_dpbusd_epi32((__m512i)(sums), (__m512i)(weights), (__m512i)(x))
#define ADD_PAIR(sums, low, first, high, second, bits) ((Words16)DOT(DOT(sums, low, first), high, second))
#define WHOLE(sums, bits) _mm512_cvtepi32_ps((__m512i)(sums))
#define MULTIPLY_ADD(a, b, c) _mm512_fmadd_ps(a, b, c)
#include "low_bit_int8_rows.h"

#if defined(__linux__) && !defined(NO_AMX) && __has_include(<amxint8intrin.h>)
#include "low_bit_int8_amx.h"
#else
int low_bit_int8_has_tiles(void) { return 0; }
RoundRow low_bit_int8_round_avx2;
void low_bit_int8_round_amx(const Call* call, size_t row) { low_bit_int8_round_avx2(call, row); }
void low_bit_int8_rows_amx(const Call* call, size_t first, size_t last, size_t row, size_t end) {
    low_bit_int8_rows_avx512(call, first, last, row, end);
}
#endif
#endif
