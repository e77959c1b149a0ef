// position_noise: bits by Philox4x32-10, noise by two logarithms (reference/noise.py).
#pragma once
#include "intrinsics.cuh"

enum Purpose { SAMPLE = 0, ACCEPT = 1, RESIDUAL = 2, DRAFT = 3 };

// The lowest and the highest noise, rounded outwards.
#define NOISE_LOW (-2.87f)
#define NOISE_HIGH 17.34f

#define PHILOX_M0 0xD2511F53u
#define PHILOX_M1 0xCD9E8D57u
#define PHILOX_W0 0x9E3779B9u
#define PHILOX_W1 0xBB67AE85u

// One stream of noise. Only the first counter word (token / 4) differs within a row, so half of the first two rounds is
// the same for all of its tokens and is computed here, once.
struct Noise {
    u32 key0, key1;                 // of the third round
    u32 first1;                     // mixed into the third word by the first round
    u32 second0, second1, second3;  // mixed into the first and third word by the second round; its fourth word

    __device__ __forceinline__ Noise(u64 seed, u64 position, u32 purpose) {
        u32 k0 = u32(seed), k1 = u32(seed >> 32);
        u64 right = u64(u32(position >> 32)) * PHILOX_M1;
        u32 c0 = u32(right >> 32) ^ u32(position) ^ k0;
        first1 = purpose ^ k1;
        u64 left = u64(c0) * PHILOX_M0;
        second0 = u32(right) ^ (k0 + PHILOX_W0);
        second1 = u32(left >> 32) ^ (k1 + PHILOX_W1);
        second3 = u32(left);
        key0 = k0 + 2 * PHILOX_W0;
        key1 = k1 + 2 * PHILOX_W1;
    }

    // The random words of tokens 8 * group to 8 * group + 7.
    __device__ __forceinline__ void words(u32 group, u32 (&out)[8]) const {
        quad(2 * group, out);
        quad(2 * group + 1, out + 4);
    }

    // The random word of one token.
    __device__ __forceinline__ u32 word(u32 token) const {
        u32 four[4];
        quad(token / 4, four);
        u32 low = token & 1 ? four[1] : four[0], high = token & 1 ? four[3] : four[2];
        return token & 2 ? high : low;
    }

    // The random words of tokens 4 * quad to 4 * quad + 3.
    __device__ __forceinline__ void quad(u32 quad, u32* out) const {
        u64 left = u64(quad) * PHILOX_M0;
        u64 right = u64(u32(left >> 32) ^ first1) * PHILOX_M1;
        u32 c0 = u32(right >> 32) ^ second0, c1 = u32(right), c2 = second1 ^ u32(left), c3 = second3;
#pragma unroll
        for (int round = 0; round < 8; round++) {
            left = u64(c0) * PHILOX_M0;
            right = u64(c2) * PHILOX_M1;
            c0 = u32(right >> 32) ^ c1 ^ (key0 + round * PHILOX_W0);
            c2 = u32(left >> 32) ^ c3 ^ (key1 + round * PHILOX_W1);
            c1 = u32(right);
            c3 = u32(left);
        }
        out[0] = c0, out[1] = c1, out[2] = c2, out[3] = c3;
    }
};

// u = (n + 0.5) / 2^24 of the top 24 bits of a word.
__device__ __forceinline__ double uniform(u32 word) { return (double(word >> 8) + 0.5) * 5.9604644775390625e-8; }

// The noise by definition: float64 logarithms, rounded once. Rare, and long: one copy per kernel.
__device__ __noinline__ float gumbel(u32 word) { return float(-log(-log(uniform(word)))); }

// The same to about 3e-6, without float64. 1 - u is exact where it is small.
__device__ __forceinline__ float gumbel_approx(u32 word) {
    u32 n = word >> 8;
    float above = (float(0xffffffu - n) + 0.5f) * 5.9604645e-8f;
    float exponential = above < 0.5f ? -log1pf(-above) : -logf((float(n) + 0.5f) * 5.9604645e-8f);
    return -logf(exponential);
}

// A lower bound that costs two approximate logarithms: -ln u <= (1 - u) / u. In units of ln 2.
__device__ __forceinline__ float gumbel_low_log2(u32 word) {
    float above_one = __uint_as_float(0x3f800000u | (word >> 9));
    return log2_approx(above_one - 1.0f) - log2_approx(2.0f - above_one);
}

// Whether the noise of `word` can exceed -ln(x), which holds iff -ln u < x. Since 1 - u <= -ln u, one comparison
// excludes most tokens.
__device__ __forceinline__ bool may_exceed(u32 word, float x) {
    return __uint_as_float(0x3f800000u | (~word >> 9)) < 1.0000003f + x;
}
