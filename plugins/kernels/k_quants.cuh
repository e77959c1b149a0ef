// Types K of GGUF (plugins/operators/k_quants_layout.py): integers in the order of int4.cuh or int8.cuh. 256 inputs
// share a float16 number that multiplies the int8 scales of their groups, and with minima another one that multiplies
// these. The products are float32, so no scale is rounded.
#pragma once
#include "int4.cuh"
#include "int8.cuh"

template <class T_, int BITS>
struct KQuants {
    using T = T_;
    using Scale = signed char;
    using More = u16;
    static constexpr int LOADS = BITS / 4;
    static constexpr bool SCALES_NUMBERS = false, MINIMA = BITS == 4;
    static constexpr int GROUP = MINIMA ? 32 : 16;
    const Scale* scales;  // of a chunk: four scales, then four minima; or eight scales
    const More* factors;  // of two chunks: that of scales, then that of minima, which are subtracted
    int shift;

    struct Held {
        uint2 scales;
        u32 factors;
    };

    __device__ __forceinline__ int stored(int inner) const { return 8 * chunks_of(inner); }

    __device__ __forceinline__ void advance(i64 outputs, int stored) {
        scales += outputs * stored;
        factors += outputs * stored / (MINIMA ? 8 : 16);
    }

    __device__ __forceinline__ Held load(i64 output_at, int chunk) const {
        Held held;
        held.scales = __ldg(reinterpret_cast<const uint2*>(scales + output_at + 8 * chunk));
        i64 at = output_at / 16 + chunk / 2;
        held.factors = MINIMA ? __ldg(reinterpret_cast<const u32*>(factors) + at) : __ldg(factors + at);
        return held;
    }

    __device__ __forceinline__ Held select(Held held, int) const { return held; }

    static __device__ __forceinline__ float byte_of(u32 four, int i) {
        return static_cast<signed char>(four >> 8 * i & 255);
    }

    // `group`: of 32 inputs, or of 16
    static __device__ __forceinline__ float scale(const Held& held, int group) {
        u32 four = MINIMA || group < 4 ? held.scales.x : held.scales.y;
        return Fp16::unpack(held.factors).x * byte_of(four, group % 4);
    }

    static __device__ __forceinline__ float minimum(const Held& held, int group) {
        return Fp16::unpack(held.factors).y * byte_of(held.scales.y, group);
    }

    __device__ __forceinline__ u32 operand(const Held&, int, int) const { return 0; }  // the zero point of nibbles

    static __device__ __forceinline__ u32 pair(const uint4& words, int group, int i, u32 zero) {
        if constexpr (BITS == 4) return Nibbles<T>::pair(word(words, group), i, zero);
        else return Bytes<T>::pair(word(words, 2 * group + i / 2), i % 2 * 2);
    }

    __device__ __forceinline__ float factor(int) const { return 1; }
};
