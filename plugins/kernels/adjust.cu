// adjust_logits: bias and penalties of a few tokens, in place. Each operation is rounded by itself, as the definition
// requires, so every device gives the same bits. A thread handles one token of one request in all of its rows.

#include "variants.cuh"

#include "logits.cuh"

__device__ __forceinline__ void put(float* to, float x) { *to = x; }

__device__ __forceinline__ void put(bf16* to, float x) { asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(to->bits) : "f"(x)); }

__device__ __forceinline__ void put(fp16* to, float x) { asm("cvt.rn.f16.f32 %0, %1;" : "=h"(to->bits) : "f"(x)); }

__device__ __forceinline__ float largest(const float*) { return __int_as_float(0x7f7fffff); }
__device__ __forceinline__ float largest(const bf16*) { return __int_as_float(0x7f7f0000); }
__device__ __forceinline__ float largest(const fp16*) { return 65504.0f; }

struct Entries {
    const int *tokens, *counts, *in_prompt;
    const float* bias;
    const int* len;
};

struct Penalties { const float *presence, *frequency, *repetition; };

// Grid (parts of the entries, requests).
template <class T>
__device__ __forceinline__ void adjust_logits(const i64* draft_tokens, const Entries& entries,
                                              const Penalties& penalties, int rows, int vocab, int columns, T* logits) {
    int item = blockIdx.y, column = blockIdx.x * blockDim.x + threadIdx.x;
    if (column >= min(entries.len[item], columns)) return;
    i64 place = i64(item) * columns + column;
    int token = entries.tokens[place], count = entries.counts[place];
    if (token < 0 || token >= vocab) return;
    bool in_prompt = entries.in_prompt[place] != 0;
    float bias = entries.bias[place], limit = largest(logits);
    float presence = penalties.presence[item], frequency = penalties.frequency[item];
    float repetition = penalties.repetition[item];
    const i64* draft = draft_tokens + i64(item) * (rows - 1);
    T* logit = logits + i64(item) * rows * vocab + token;
    for (int row = 0; row < rows; row++, logit += vocab) {
        if (row > 0 && draft[row - 1] == token) count++;
        float x = to_float(*logit);
        if (!finite(x)) continue;
        x = __fadd_rn(x, bias);
        if (in_prompt || count > 0) x = x > 0.0f ? __fdiv_rn(x, repetition) : __fmul_rn(x, repetition);
        float taken = __fadd_rn(__fmul_rn(frequency, float(count)), count > 0 ? presence : 0.0f);
        x = __fsub_rn(x, taken);
        put(logit, fminf(fmaxf(x, -limit), limit));
    }
}

#define ADJUST(NAME, T)                                                                                          \
    extern "C" __global__ void __launch_bounds__(128) adjust_##NAME(                                             \
        const i64* draft_tokens, const int* entry_tokens, const int* entry_counts, const int* entry_in_prompt,   \
        const float* entry_bias, const int* entry_len, const float* presence, const float* frequency,            \
        const float* repetition, int rows, int vocab, int columns, T* logits) {                                  \
        adjust_logits(draft_tokens, Entries{entry_tokens, entry_counts, entry_in_prompt, entry_bias, entry_len}, \
                      Penalties{presence, frequency, repetition}, rows, vocab, columns, logits);                 \
    }

IF_BF16(ADJUST(bf16, bf16))
IF_FP16(ADJUST(fp16, fp16))
IF_FP32(ADJUST(fp32, float))
