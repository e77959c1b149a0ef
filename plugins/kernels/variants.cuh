// Kernels to instantiate: all of them, unless the compiler options select some, each by a 1: -DSELECTED -DBF16=1
// -DHEAD_128=1 (plugins/kernels/compile.py).
#pragma once

#ifndef SELECTED
#define BF16 1
#define FP16 1
#define FP32 1
#define HEAD_32 1
#define HEAD_64 1
#define HEAD_96 1
#define HEAD_128 1
#define HEAD_256 1
#define HEAD_512 1
#endif

#if BF16
#define IF_BF16(...) __VA_ARGS__
#else
#define IF_BF16(...)
#endif
#if FP16
#define IF_FP16(...) __VA_ARGS__
#else
#define IF_FP16(...)
#endif
#if FP32
#define IF_FP32(...) __VA_ARGS__
#else
#define IF_FP32(...)
#endif
#if HEAD_32
#define IF_HEAD_32(...) __VA_ARGS__
#else
#define IF_HEAD_32(...)
#endif
#if HEAD_64
#define IF_HEAD_64(...) __VA_ARGS__
#else
#define IF_HEAD_64(...)
#endif
#if HEAD_96
#define IF_HEAD_96(...) __VA_ARGS__
#else
#define IF_HEAD_96(...)
#endif
#if HEAD_128
#define IF_HEAD_128(...) __VA_ARGS__
#else
#define IF_HEAD_128(...)
#endif
#if HEAD_256
#define IF_HEAD_256(...) __VA_ARGS__
#else
#define IF_HEAD_256(...)
#endif
#if HEAD_512
#define IF_HEAD_512(...) __VA_ARGS__
#else
#define IF_HEAD_512(...)
#endif

// KIND(NAME, T, D) for every head size of attention, and for every key size of recurrent layers.
#define FOR_HEAD_DIMS(KIND, NAME, T) \
    IF_HEAD_32(KIND(NAME, T, 32))    \
    IF_HEAD_64(KIND(NAME, T, 64)) IF_HEAD_128(KIND(NAME, T, 128)) IF_HEAD_256(KIND(NAME, T, 256))
#define FOR_KEY_DIMS(KIND, NAME, T) \
    IF_HEAD_32(KIND(NAME, T, 32))   \
    IF_HEAD_64(KIND(NAME, T, 64)) IF_HEAD_96(KIND(NAME, T, 96)) IF_HEAD_128(KIND(NAME, T, 128))
