// Verification and drafting for a batch: row_stats if a request filters or uses the rejection rule, then choose,
// whose last block per request also accepts. Parameters: inputs, int32 scalars, outputs.
#include "accept.cuh"
#include "variants.cuh"

#define PARTS_PER_LANE 2  // so a row has at most 64 parts

// The groups of a row that form this block's part.
struct Span {
    int first, last;

    __device__ __forceinline__ explicit Span(int groups) {
        int each = (groups + gridDim.x - 1) / gridDim.x;
        first = min(int(blockIdx.x) * each, groups);
        last = min(first + each, groups);
    }
};

// Result of one block for its part of a row.
struct Partial {
    Contender best;
    int empty;  // see part_winner
};

__device__ __forceinline__ Partial load_fresh(const Partial* from) {
    const u32* words = reinterpret_cast<const u32*>(from);
    float sum = __uint_as_float(load_fresh(words)), x = __uint_as_float(load_fresh(words + 1));
    return {{sum, x, load_fresh(words + 2), int(load_fresh(words + 3))}, int(load_fresh(words + 4))};
}

// One warp: the winner of a row, from the winners of its parts. As block_winner(), but for `refused` and its two
// distributions.
__device__ __forceinline__ int winner(const Partial* partials, int parts, const Request& request, bool refused) {
    Partial mine[PARTS_PER_LANE];
    bool full = false;
#pragma unroll
    for (int i = 0; i < PARTS_PER_LANE; i++) {
        int part = (threadIdx.x & 31) + 32 * i;
        mine[i] = {Contender::none(), 0};
        if (part < parts) mine[i] = load_fresh(partials + part);
        full = full || (mine[i].best.token >= 0 && !mine[i].empty);
    }
    full = __any_sync(ALL_LANES, full);
    Scaling scaling(!request.sampled ? 0.0f : refused && full ? 1.0f : request.temperature);
    float highest = -INFINITE;
#pragma unroll
    for (int i = 0; i < PARTS_PER_LANE; i++) {
        if (full && mine[i].empty) mine[i].best = Contender::none();
        highest = fmaxf(highest, mine[i].best.sum);
    }
    highest = unordered(__reduce_max_sync(ALL_LANES, ordered(highest)));
    int token = -1, contenders = 0;
#pragma unroll
    for (int i = 0; i < PARTS_PER_LANE; i++) {
        if (mine[i].best.sum < highest - scaling.slack(highest)) mine[i].best.token = -1;
        contenders += __popc(__ballot_sync(ALL_LANES, mine[i].best.token >= 0));
        token = max(token, mine[i].best.token);
    }
    if (contenders <= 1) return __reduce_max_sync(ALL_LANES, token);
    Best best = {0.0, -1};
#pragma unroll 1
    for (int i = 0; i < PARTS_PER_LANE; i++) {
        Contender one = mine[0].best;
        if (i) one = mine[1].best;
        if (one.token >= 0) best = better(best, {scaling.exact(one.x, one.word), one.token});
    }
    for (int offset = 16; offset; offset >>= 1) best = better(best, from_lane(best, offset));
    return best.token;
}

// Under the rejection rule: the number of accepted drafts, from the flags of row_stats.
__device__ __forceinline__ int standing(const Stats* stats, int length) {
    int lane = threadIdx.x & 31;
    u32 refused = __ballot_sync(ALL_LANES, lane < length && !stats[lane].stands);
    return refused ? __ffs(refused) - 1 : length;
}

// Add the counts of this block to those of its row in global memory. The last block of a row gets the sum and leaves
// zeros for the next launch.
__device__ __forceinline__ bool merge(u32* counts, u32* row_counts, u32* arrivals) {
    __shared__ bool last;
#pragma unroll 1
    for (int bin = threadIdx.x; bin < BF16_COUNTS; bin += blockDim.x)
        if (counts[bin]) atomicAdd(&row_counts[bin], counts[bin]);
    __syncthreads();
    if (threadIdx.x == 0) last = arrive(arrivals) == gridDim.x - 1;
    __syncthreads();
    if (!last) return false;
    if (threadIdx.x == 0) *arrivals = 0;
    const int each = 3, quads = BF16_COUNTS / 4;  // of each of 768 threads or more
    uint4 sums[each];
#pragma unroll
    for (int i = 0; i < each; i++) {
        int quad = threadIdx.x + i * blockDim.x;
        if (quad < quads) sums[i] = load_fresh(reinterpret_cast<const uint4*>(row_counts) + quad);
    }
#pragma unroll
    for (int i = 0; i < each; i++) {
        int quad = threadIdx.x + i * blockDim.x;
        if (quad >= quads) continue;
        reinterpret_cast<uint4*>(counts)[quad] = sums[i];
        reinterpret_cast<uint4*>(row_counts)[quad] = make_uint4(0, 0, 0, 0);
    }
    __syncthreads();
    return true;
}

// Grid (parts, rows, batch), 1024 threads. Writes stats [batch, rows] for requests that filter or are `by_rejection`,
// or for every sampled one if `with_probs`. Only bf16 has more than one part: `counts` [batch * rows, BF16_COUNTS] and
// `arrivals` [batch * rows] are zeros before and after.
template <class T>
__device__ __forceinline__ void row_stats(const T* logits, const int* bitmask, const i64* draft_tokens,
                                          const i64* draft_len, const Sampling& sampling, const float* draft_probs,
                                          int rows, int vocab, int with_probs, u32* counts, u32* arrivals,
                                          Stats* stats) {
    __shared__ __align__(16) Histogram histogram;
    int index = blockIdx.y, item = blockIdx.z;
    Request request(sampling, item, vocab);
    Drafts drafts(draft_tokens, draft_len, draft_probs, item, rows, vocab);
    bool normalise = with_probs ? request.sampled : request.by_rejection;
    if (index > drafts.length || !(request.filtered || normalise)) return;
    i64 place = i64(item) * rows + index;
    Row<T> row(logits, bitmask, place, vocab);
    Span span(row.groups());
    count_values(row, span.first, span.last, histogram);
    if (gridDim.x > 1 && !merge(histogram.low, counts + place * BF16_COUNTS, arrivals + place)) return;
    Distribution dist = row_distribution(row, request, normalise, histogram);
    if (request.by_rejection && index < drafts.length) judge(row, request, drafts, index, dist);
    if (threadIdx.x == 0) stats[place] = dist.stats;
}

// Grid (parts, rows, batch). Each block finds the winner of its part of its row. The last block of a request to end
// reads them all, writes the emitted tokens, and leaves its counter at 0 for the next launch. By then all blocks have
// read the request's position, which `progress` may advance. Without `stats` there are neither filters nor the
// rejection rule. `ids`: see Row.
template <class T>
__device__ __forceinline__ void choose(const T* logits, const int* bitmask, const i64* draft_tokens,
                                       const i64* draft_len, const Sampling& sampling, const float* draft_probs,
                                       const Stats* stats, const int* ids, int rows, int vocab, int drafting,
                                       Partial* partials, u32* counters, const Progress& progress, i64* tokens,
                                       i64* count) {
    int parts = gridDim.x, index = blockIdx.y, item = blockIdx.z;
    Row<T> row(logits, bitmask, i64(item) * rows + index, vocab, ids);
    Span span(row.groups());
    auto next = row.fetch(span.first + threadIdx.x, span.last);  // in flight while the request is read
    Request request(sampling, item, vocab);
    Drafts drafts(draft_tokens, draft_len, draft_probs, item, rows, vocab);
    const Stats* mine = stats + i64(item) * rows;
    Partial* results = partials + i64(item) * rows * parts;
    bool by_rejection = request.by_rejection && !drafting && stats, filtered = request.filtered && stats;
    int accepted = by_rejection ? standing(mine, drafts.length) : 0;

    if (by_rejection ? index == accepted : index <= drafts.length) {
        Distribution dist = {{1.0, 0.0f, -INFINITE, 0, 0}, request.temperature, filtered};
        if (by_rejection || filtered) dist.stats = mine[index];
        bool refused = by_rejection && index < drafts.length, empty;
        Contender best = part_winner(row, request, dist, drafts, index, refused, target_purpose(request, drafting),
                                     span.first, span.last, next, empty);
        if (threadIdx.x == 0) results[index * parts + blockIdx.x] = {best, empty};
    }

    __shared__ bool ends;
    __shared__ int winners[32];
    if (threadIdx.x == 0) ends = arrive(&counters[item]) == u32(parts * rows - 1);
    __syncthreads();
    if (!ends) return;
    i64 draft = drafts.of_lane();
    for (int row = threadIdx.x >> 5; row <= drafts.length; row += blockDim.x >> 5) {
        if (by_rejection && row != accepted) continue;
        int token = winner(results + row * parts, parts, request, by_rejection && row < drafts.length);
        if ((threadIdx.x & 31) == 0) winners[row] = ids && token >= 0 ? ids[token] : token;
    }
    __syncthreads();
    if (threadIdx.x >= 32) return;
    if (!by_rejection) {
        int lane = threadIdx.x;
        bool agrees = lane < drafts.length && winners[lane] >= 0 && winners[lane] == draft;
        accepted = __ffs(~__ballot_sync(ALL_LANES, agrees)) - 1;
    }
    int token = winners[accepted], number = accepted + (token >= 0);
    i64 emitted = emit(draft, rows, accepted, token, tokens + i64(item) * rows);
    progress.advance(item, emitted, number);
    if (threadIdx.x != 0) return;
    if (count) count[item] = number;
    counters[item] = 0;
}

// Grid (parts, batch). The distribution of each token, float32 [batch, vocab]; one-hot for a token that was not
// sampled. `ids`: see Row.
template <class T>
__device__ __forceinline__ void write_draft_probs(const T* logits, const Sampling& sampling, const Stats* stats,
                                                  const i64* token, const int* ids, int vocab, float* probs) {
    int item = blockIdx.y;
    Request request(sampling, item, vocab);
    Row<T> row(logits, nullptr, item, vocab, ids);
    bool drawn = request.sampled && token[item] >= 0;
    Distribution dist = {{1.0, 0.0f, -INFINITE, 0, 0}, request.temperature, request.filtered};
    if (drawn) dist.stats = stats[item];
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < vocab; i += gridDim.x * blockDim.x)
        probs[i64(item) * vocab + i] = drawn ? dist.probability(row.at(i)) : float(row.id(i) == token[item]);
}

// row_stats: two blocks per processor, if registers suffice; choose: three.
#define KERNELS(NAME, T)                                                                                               \
    extern "C" __global__ void __launch_bounds__(1024, sizeof(T) == 2 ? 2 : 1) row_stats_##NAME(                       \
        const T* logits, const int* bitmask, const i64* draft_tokens, const i64* draft_len, SAMPLING_PARAMETERS,       \
        const float* draft_probs, int rows, int vocab, int with_probs, u32* counts, u32* arrivals, Stats* stats) {     \
        row_stats(logits, bitmask, draft_tokens, draft_len, SAMPLING, draft_probs, rows, vocab, with_probs, counts,    \
                  arrivals, stats);                                                                                    \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(256, 3) choose_##NAME(                                                \
        const T* logits, const int* bitmask, const i64* draft_tokens, const i64* draft_len, SAMPLING_PARAMETERS,       \
        const float* draft_probs, const Stats* stats, const int* ids, int rows, int vocab, int drafting,               \
        Partial* partials, u32* counters, i64* length, i64* next_position, i64* newest, i64* tokens, i64* count) {     \
        choose(logits, bitmask, draft_tokens, draft_len, SAMPLING, draft_probs, stats, ids, rows, vocab, drafting,     \
               partials, counters, Progress{length, next_position, newest}, tokens, count);                            \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(256)                                                                  \
        draft_probs_##NAME(const T* logits, SAMPLING_PARAMETERS, const Stats* stats, const i64* token, const int* ids, \
                           int vocab, float* probs) {                                                                  \
        write_draft_probs(logits, SAMPLING, stats, token, ids, vocab, probs);                                          \
    }

IF_BF16(KERNELS(bf16, bf16))
IF_FP16(KERNELS(fp16, fp16))
IF_FP32(KERNELS(fp32, float))
