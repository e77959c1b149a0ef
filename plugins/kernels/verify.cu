// Verification and drafting for a whole batch: row_stats where a request filters or uses the rejection rule, then
// choose, whose last block per request also accepts. Parameters: inputs, int32 scalars, outputs.
#include "accept.cuh"
#include "variants.cuh"

// What one block found in its part of a row.
struct Partial {
    double key;
    int token;
    int empty;  // see part_winner
};

__device__ __forceinline__ bool beats(const Partial& a, const Partial& b) {
    if (a.token < 0 || b.token < 0) return a.token >= 0;
    if (a.empty != b.empty) return b.empty;
    return Best{a.key, a.token}.beats(Best{b.key, b.token});
}

// One warp: the winner of a row, from the partial results of its parts.
__device__ __forceinline__ int winner(const volatile Partial* partials, int parts) {
    Partial best = {-1.0, -1, 1};
#pragma unroll 1
    for (int i = threadIdx.x & 31; i < parts; i += 32) {
        Partial other = {partials[i].key, partials[i].token, partials[i].empty};
        if (beats(other, best)) best = other;
    }
    for (int offset = 16; offset; offset >>= 1) {
        Partial other = {from_lane(best.key, offset), from_lane(best.token, offset), from_lane(best.empty, offset)};
        if (beats(other, best)) best = other;
    }
    return best.token;
}

// Under the rejection rule: how many drafts stand, from the flags of row_stats.
__device__ __forceinline__ int standing(const Stats* stats, int length) {
    int row = 0;
    while (row < length && stats[row].stands) row++;
    return row;
}

// Grid (rows, batch), 1024 threads. Writes stats [batch, rows] where a request filters or is `by_rejection`, or for
// every sampled one if `laws`.
template <class T>
__device__ __forceinline__ void row_stats(const T* logits, const int* bitmask, const i64* draft_tokens,
                                          const i64* draft_len, const Sampling& sampling, const float* draft_probs,
                                          int rows, int vocab, int laws, Stats* stats) {
    __shared__ Histogram histogram;
    int index = blockIdx.x, item = blockIdx.y;
    Request request(sampling, item, vocab);
    Drafts drafts(draft_tokens, draft_len, draft_probs, item, rows, vocab);
    bool normalise = laws ? request.sampled : request.by_rejection;
    if (index > drafts.length || !(request.filtered || normalise)) return;
    Row<T> row(logits, bitmask, i64(item) * rows + index, vocab);
    Law law = row_law(row, request, normalise, histogram);
    if (request.by_rejection && index < drafts.length) judge(row, request, drafts, index, law);
    if (threadIdx.x == 0) stats[i64(item) * rows + index] = law.stats;
}

// Grid (parts, rows, batch). Each block finds the winner of its part of its row; the last block of a request to end
// looks at them all, writes what the request emits, and leaves its counter at 0 for the next launch. Without `stats`
// there are neither filters nor the rejection rule.
template <class T>
__device__ __forceinline__ void choose(const T* logits, const int* bitmask, const i64* draft_tokens,
                                       const i64* draft_len, const Sampling& sampling, const float* draft_probs,
                                       const Stats* stats, int rows, int vocab, int drafting, Partial* partials,
                                       u32* counters, const Progress& progress, i64* tokens, i64* count) {
    int part = blockIdx.x, parts = gridDim.x, index = blockIdx.y, item = blockIdx.z;
    Request request(sampling, item, vocab);
    Drafts drafts(draft_tokens, draft_len, draft_probs, item, rows, vocab);
    const Stats* mine = stats + i64(item) * rows;
    Partial* results = partials + i64(item) * rows * parts;
    bool by_rejection = request.by_rejection && !drafting && stats, filtered = request.filtered && stats;
    int accepted = by_rejection ? standing(mine, drafts.length) : 0;

    if (by_rejection ? index == accepted : index <= drafts.length) {
        Row<T> row(logits, bitmask, i64(item) * rows + index, vocab);
        Law law = {{1.0, 0.0f, -INFINITE, 0, 0}, request.temperature, filtered};
        if (by_rejection || filtered) law.stats = mine[index];
        int each = (row.groups() + parts - 1) / parts;
        int first = part * each, last = min(first + each, row.groups());
        bool refused = by_rejection && index < drafts.length, empty;
        Best best = part_winner(row, request, law, drafts, index, refused, target_purpose(request, drafting), first,
                                last, empty);
        if (threadIdx.x == 0) results[index * parts + part] = {best.key, best.token, empty};
    }

    __shared__ bool ends;
    __shared__ int winners[32];
    if (threadIdx.x == 0) {
        __threadfence();
        ends = atomicAdd(&counters[item], 1u) == u32(parts * rows - 1);
        __threadfence();
    }
    __syncthreads();
    if (!ends) return;
    int length = drafts.length;
    for (int row = threadIdx.x >> 5; row <= length; row += blockDim.x >> 5) {
        if (by_rejection && row != accepted) continue;
        int token = winner(results + row * parts, parts);
        if ((threadIdx.x & 31) == 0) winners[row] = token;
    }
    __syncthreads();
    if (threadIdx.x != 0) return;
    if (!by_rejection)
        while (accepted < length && winners[accepted] >= 0 && winners[accepted] == drafts.tokens[accepted]) accepted++;
    i64* emitted = tokens + i64(item) * rows;
    int number = emit(drafts, rows, accepted, winners[accepted], emitted);
    if (count) count[item] = number;
    progress.advance(item, emitted, number);
    counters[item] = 0;
}

// Grid (parts, batch). The law each token was drawn from, float32 [batch, vocab]; one-hot where it was chosen.
template <class T>
__device__ __forceinline__ void draft_law(const T* logits, const Sampling& sampling, const Stats* stats,
                                          const i64* token, int vocab, float* probs) {
    int item = blockIdx.y;
    Request request(sampling, item, vocab);
    Row<T> row(logits, nullptr, item, vocab);
    bool drawn = request.sampled && token[item] >= 0;
    Law law = {{1.0, 0.0f, -INFINITE, 0, 0}, request.temperature, request.filtered};
    if (drawn) law.stats = stats[item];
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < vocab; i += gridDim.x * blockDim.x)
        probs[i64(item) * vocab + i] = drawn ? law.probability(row.at(i)) : float(i == token[item]);
}

#define SAMPLING_PARAMETERS                                                                                     \
    const float *temperature, const i64 *top_k, const float *top_p, const float *min_p, const i64 *seed,         \
        const i64 *position, const i64 *rule
#define SAMPLING Sampling{temperature, top_k, top_p, min_p, seed, position, rule}

#define KERNELS(NAME, T)                                                                                         \
    extern "C" __global__ void __launch_bounds__(1024) row_stats_##NAME(                                         \
        const T* logits, const int* bitmask, const i64* draft_tokens, const i64* draft_len, SAMPLING_PARAMETERS, \
        const float* draft_probs, int rows, int vocab, int laws, Stats* stats) {                                 \
        row_stats(logits, bitmask, draft_tokens, draft_len, SAMPLING, draft_probs, rows, vocab, laws, stats);    \
    }                                                                                                            \
    extern "C" __global__ void __launch_bounds__(256) choose_##NAME(                                             \
        const T* logits, const int* bitmask, const i64* draft_tokens, const i64* draft_len, SAMPLING_PARAMETERS, \
        const float* draft_probs, const Stats* stats, int rows, int vocab, int drafting, Partial* partials,      \
        u32* counters, i64* length, i64* last, i64* previous, i64* tokens, i64* count) {                         \
        choose(logits, bitmask, draft_tokens, draft_len, SAMPLING, draft_probs, stats, rows, vocab, drafting,    \
               partials, counters, Progress{length, last, previous}, tokens, count);                             \
    }                                                                                                            \
    extern "C" __global__ void __launch_bounds__(256) draft_law_##NAME(                                          \
        const T* logits, SAMPLING_PARAMETERS, const Stats* stats, const i64* token, int vocab, float* probs) {   \
        draft_law(logits, SAMPLING, stats, token, vocab, probs);                                                 \
    }

IF_BF16(KERNELS(bf16, bf16))
IF_FP16(KERNELS(fp16, fp16))
IF_FP32(KERNELS(fp32, float))
