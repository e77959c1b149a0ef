/* The intrinsics of AVX2, FMA and F16C. In <immintrin.h> gcc reads those of all processors for 0.3 s, in each file that
 * includes it. Its headers for some of them ask whether it is what includes them. */
#if !defined(__GNUC__) || defined(__clang__) || !__has_include(<avx2intrin.h>)
#include <immintrin.h>
#elif !defined(_IMMINTRIN_H_INCLUDED)
#define _IMMINTRIN_H_INCLUDED
#include <smmintrin.h>

#include <avxintrin.h> /* before the others, which use its types */

#include <avx2intrin.h>
#include <f16cintrin.h>
#include <fmaintrin.h>
#endif
