/* How the files for AVX2 and AVX-512 load weights and values of a tile. */
#ifndef LOW_BIT_INT8_LOADS_H
#define LOW_BIT_INT8_LOADS_H
#include "avx2.h"
#include "low_bit_int8.h"

#define AVX2 __attribute__((target("avx2,fma")))

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

#endif
