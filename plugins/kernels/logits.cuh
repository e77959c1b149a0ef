// A row of logits with its mask, read in groups of eight tokens: 16 or 32 bytes of logits, one byte of mask.
#pragma once
#include "intrinsics.cuh"

struct bf16 { u16 bits; };
struct fp16 { u16 bits; };

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(bf16 x) { return __uint_as_float(u32(x.bits) << 16); }
__device__ __forceinline__ float to_float(fp16 x) { return fp16_to_float(x.bits); }

// Eight 16-bit logits, packed in pairs. `Lanes` defines how to read a pair.
template <class Lanes>
struct Packed {
    u32 pair[4];

    __device__ __forceinline__ void clear() { pair[0] = pair[1] = pair[2] = pair[3] = Lanes::lowest; }

    // The first `count` logits at `source`, at any alignment. Nothing else is read.
    __device__ __forceinline__ void load(const void* source, int count) {
        if (count >= 8 && (u64(source) & 15) == 0) {
            uint4 all = *reinterpret_cast<const uint4*>(source);
            pair[0] = all.x, pair[1] = all.y, pair[2] = all.z, pair[3] = all.w;
        } else {
            const u16* halves = reinterpret_cast<const u16*>(source);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                u32 low = 2 * i < count ? halves[2 * i] : Lanes::lowest & 0xffffu;
                u32 high = 2 * i + 1 < count ? halves[2 * i + 1] : Lanes::lowest & 0xffffu;
                pair[i] = low | high << 16;
            }
        }
    }

    // A nibble times this constant has bit k of the nibble at the sign of byte k.
    __device__ __forceinline__ void mask(u32 bits) {
#pragma unroll
        for (int j = 0; j < 4; j++) {
            u32 signs = (j < 2 ? bits & 15 : bits >> 4) * 0x10204080u;
            u32 allowed = spread_signs(signs, j & 1 ? 0xbbaau : 0x9988u);
            pair[j] = (pair[j] & allowed) | (Lanes::lowest & ~allowed);
        }
    }

    // The largest; NaN only if there is nothing else.
    __device__ __forceinline__ float top() const {
        u32 two = Lanes::max(Lanes::max(pair[0], pair[1]), Lanes::max(pair[2], pair[3]));
        return fmaxf(Lanes::low(two), Lanes::high(two));
    }

    // `i` is a constant in unrolled loops.
    __device__ __forceinline__ float at(int i) const {
        return i & 1 ? Lanes::high(pair[i / 2]) : Lanes::low(pair[i / 2]);
    }

    __device__ __forceinline__ float front() const { return Lanes::low(pair[0]); }

    __device__ __forceinline__ void rotate() {
#pragma unroll
        for (int j = 0; j < 3; j++) pair[j] = __funnelshift_r(pair[j], pair[j + 1], 16);
        pair[3] >>= 16;
    }
};

struct LanesBf16 {
    static const u32 lowest = 0xff80ff80u;
    static __device__ __forceinline__ u32 max(u32 a, u32 b) { return max_bf16x2(a, b); }
    static __device__ __forceinline__ float low(u32 two) { return __uint_as_float(two << 16); }
    static __device__ __forceinline__ float high(u32 two) { return __uint_as_float(two & 0xffff0000u); }
};

struct LanesFp16 {
    static const u32 lowest = 0xfc00fc00u;
    static __device__ __forceinline__ u32 max(u32 a, u32 b) { return max_fp16x2(a, b); }
    static __device__ __forceinline__ float low(u32 two) { return fp16_to_float(two & 0xffffu); }
    static __device__ __forceinline__ float high(u32 two) { return fp16_to_float(two >> 16); }
};

struct Wide {
    float x[8];

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int i = 0; i < 8; i++) x[i] = -INFINITE;
    }

    __device__ __forceinline__ void load(const void* source, int count) {
        if (count >= 8 && (u64(source) & 15) == 0) {
            float4 a = reinterpret_cast<const float4*>(source)[0], b = reinterpret_cast<const float4*>(source)[1];
            x[0] = a.x, x[1] = a.y, x[2] = a.z, x[3] = a.w, x[4] = b.x, x[5] = b.y, x[6] = b.z, x[7] = b.w;
        } else {
#pragma unroll
            for (int i = 0; i < 8; i++) x[i] = i < count ? reinterpret_cast<const float*>(source)[i] : -INFINITE;
        }
    }

    __device__ __forceinline__ void mask(u32 bits) {
#pragma unroll
        for (int i = 0; i < 8; i++) x[i] = bits >> i & 1 ? x[i] : -INFINITE;
    }

    __device__ __forceinline__ float top() const {
        float a = fmaxf(fmaxf(x[0], x[1]), fmaxf(x[2], x[3]));
        return fmaxf(a, fmaxf(fmaxf(x[4], x[5]), fmaxf(x[6], x[7])));
    }

    __device__ __forceinline__ float at(int i) const { return x[i]; }

    __device__ __forceinline__ float front() const { return x[0]; }

    __device__ __forceinline__ void rotate() {
#pragma unroll
        for (int i = 0; i < 7; i++) x[i] = x[i + 1];
    }
};

template <class T>
struct GroupOf;
template <>
struct GroupOf<bf16> {
    typedef Packed<LanesBf16> type;
};
template <>
struct GroupOf<fp16> {
    typedef Packed<LanesFp16> type;
};
template <>
struct GroupOf<float> {
    typedef Wide type;
};

template <class T>
struct Row {
    typedef typename GroupOf<T>::type Group;

    const T* logits;
    const u8* mask;  // bit t % 8 of byte t / 8 allows token t; null allows all
    int vocab;
    const int* ids;  // the target's ids of a draft's tokens, ascending; null: the same ids

    // `mask_words` is null or the words of the whole tensor, ceil(vocab / 32) per row.
    __device__ __forceinline__ Row(const T* tensor, const int* mask_words, i64 row, int vocab, const int* ids = nullptr)
        : logits(tensor + row * vocab),
          mask(mask_words ? reinterpret_cast<const u8*>(mask_words + row * ((vocab + 31) / 32)) : nullptr),
          vocab(vocab), ids(ids) {}

    __device__ __forceinline__ int id(int token) const { return ids ? ids[token] : token; }
    __device__ __forceinline__ int groups() const { return (vocab + 7) / 8; }

    // A group whose loads are in flight: nothing waits for them before take().
    struct Incoming {
        Group raw;
        u32 allowed;

        // Tokens that are masked or past the vocabulary are -infinity.
        __device__ __forceinline__ Group take() const {
            Group group = raw;
            if (allowed != 0xffu) group.mask(allowed);
            return group;
        }
    };

    // Load tokens 8 * index to 8 * index + 7, if index < last.
    __device__ __forceinline__ Incoming fetch(int index, int last) const {
        Incoming incoming;
        incoming.raw.clear();
        incoming.allowed = 0xffu;
        if (index >= last) return incoming;
        if (mask) incoming.allowed = mask[index];
        // independent of the mask: both loads are in flight at once
        incoming.raw.load(logits + 8 * index, vocab - 8 * index);
        return incoming;
    }

    __device__ __forceinline__ Group group(int index) const { return fetch(index, index + 1).take(); }

    // One logit, -infinity if it is masked.
    __device__ __forceinline__ float at(int token) const {
        bool allowed = !mask || (mask[token / 8] >> (token % 8) & 1);
        return allowed ? to_float(logits[token]) : -INFINITE;
    }
};
