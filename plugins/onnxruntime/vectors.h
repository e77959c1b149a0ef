/* Vectors of eight floats and the exponential function. Without contraction they have the same bits on every machine.
 */
#ifndef VECTORS_H
#define VECTORS_H
#include <stdint.h>

#define LANES 8
#define INLINE __attribute__((always_inline)) static inline

typedef float Lanes __attribute__((vector_size(4 * LANES), aligned(4)));
typedef int32_t Bits __attribute__((vector_size(4 * LANES)));

INLINE Lanes load(const float* at) { return *(const Lanes*)at; }
INLINE void save(float* at, Lanes x) { *(Lanes*)at = x; }
INLINE Lanes lanes_of(float x) { return (Lanes){x, x, x, x, x, x, x, x}; }
INLINE float sum_of(Lanes x) { return ((x[0] + x[4]) + (x[2] + x[6])) + ((x[1] + x[5]) + (x[3] + x[7])); }

/* Return a where the mask is set, else b. */
INLINE Lanes choose(Bits mask, Lanes a, Lanes b) { return (Lanes)(((Bits)a & mask) | ((Bits)b & ~mask)); }

#define LARGEST 87.0f /* an exponent that has a value in float, as its negative has */

/* Return e to the power of x, which is at most LARGEST: 2^n * e^r. An x below -LARGEST counts as that; NaN stays. */
INLINE Lanes exponential_up_to_largest(Lanes x) {
    const Lanes within = choose(x < -LARGEST, lanes_of(-LARGEST), x);
    const Lanes shifted = within * 1.44269504f + 12582912.0f; /* 1.5 * 2^23: the lowest bits are those of n */
    const Lanes n = shifted - 12582912.0f;
    const Lanes r = (within - n * 0.693359375f) + n * 2.12194440e-4f;
    Lanes p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    return ((p * r) * r + r + 1.0f) * (Lanes)(((Bits)shifted << 23) + (127 << 23));
}

/* Return e to the power of x. An x outside of [-LARGEST, LARGEST] counts as the nearest end; NaN stays. */
INLINE Lanes exponential(Lanes x) { return exponential_up_to_largest(choose(x > LARGEST, lanes_of(LARGEST), x)); }

#endif
