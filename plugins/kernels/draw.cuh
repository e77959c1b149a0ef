// The token of a row with the largest logit (greedy), or with the largest score + noise (sampled).
//
// A sampled draw compares x / temperature + g over the tokens. Most tokens cannot win, and two bounds rule them out:
// noise lies in [-2.87, 17.34], and 1 - u <= -ln u. Only tokens that pass are evaluated, in float32, and only
// contenders too close for that in float64. So the winner does not depend on how a row is cut into parts.
#pragma once
#include "logits.cuh"
#include "noise.cuh"
#include "reduce.cuh"

// A row after its filters, and the verdict on its draft under the rejection rule (row_stats).
struct Stats {
    double total;     // sum of exp(score) over the tokens that are kept
    float peak;       // largest finite logit, -infinity if there is none
    float threshold;  // smallest score that is kept
    int stands;       // the row's draft is accepted
    int drawn;        // the draft has a distribution (else it is one-hot)
};

// Scores are (logit - peak) / temperature, float32, as in reference/filters.py.
struct Distribution {
    Stats stats;
    float temperature;
    bool filtered;

    __device__ __forceinline__ float score(float x) const { return __fdiv_rn(x - stats.peak, temperature); }
    __device__ __forceinline__ bool kept(float x) const {
        return finite(x) && (!filtered || score(x) >= stats.threshold);
    }
    __device__ __forceinline__ float probability(float x) const {
        return kept(x) ? float(exp(double(score(x))) / stats.total) : 0.0f;
    }
    // A bound: no logit below it is kept. It is slightly low, to allow for rounding.
    __device__ __forceinline__ float lowest() const {
        float reach = stats.threshold * temperature;
        return filtered ? stats.peak + reach - (fabsf(reach) + fabsf(stats.peak)) * 1e-6f : -INFINITE;
    }
};

// How a value and its noise add up. Units are those of the logits, or of scores above temperature 1, so nothing
// overflows. At temperature 0 the logits alone decide.
struct Scaling {
    float temperature, x_scale, noise_scale;

    __device__ __forceinline__ explicit Scaling(float temperature)
        : temperature(temperature), x_scale(temperature > 1.0f ? 1.0f / temperature : 1.0f),
          noise_scale(temperature > 1.0f ? 1.0f : temperature) {}

    // Accurate to about six digits.
    __device__ __forceinline__ float sum(float x, u32 word) const {
        return fmaf(noise_scale, gumbel_approx(word), x * x_scale);
    }
    // Sums that differ by more than this are in the right order.
    __device__ __forceinline__ float tolerance(float sum) const { return noise_scale * 8e-6f + fabsf(sum) * 5e-7f; }
    // Slack for the rounding of bounds and of the values compared with them.
    __device__ __forceinline__ float slack(float bound) const { return noise_scale * 1e-4f + fabsf(bound) * 1e-6f; }
    __device__ __forceinline__ double exact(float x, u32 word) const {
        double scaled = temperature > 1.0f ? double(x) / double(temperature) : double(x);
        return noise_scale > 0.0f ? scaled + double(noise_scale) * double(gumbel(word)) : scaled;
    }
};

// Draw from the scores themselves.
struct FromScores {
    static const bool bootstraps = true;
    Distribution dist;
    Scaling scaling;

    __device__ __forceinline__ FromScores(const Distribution& dist) : dist(dist), scaling(dist.temperature) {}

    __device__ __forceinline__ float ceiling(float top) const { return top * scaling.x_scale; }
    // A value that some token of the row reaches: the peak is always kept.
    __device__ __forceinline__ float known() const {
        return dist.filtered ? dist.stats.peak * scaling.x_scale + NOISE_LOW * scaling.noise_scale : -INFINITE;
    }
    __device__ __forceinline__ bool value(float x, int, float& out) const {
        out = x;
        return dist.kept(x);
    }
};

// Draw from the residual max(p - q, 0) of a rejected draft: the scores are its logarithms.
struct FromResidual {
    static const bool bootstraps = false;
    Distribution dist;
    Scaling scaling;
    const float* proposed;  // the row's distribution in draft_probs; null: one-hot
    i64 draft;
    float slope, shift;  // of the bound: ln p = slope * (x - peak) - ln total

    __device__ __forceinline__ FromResidual(const Distribution& dist, const float* proposed, i64 draft)
        : dist(dist), scaling(1.0f), proposed(proposed), draft(draft), slope(fminf(1.0f / dist.temperature, 1e38f)),
          shift(1e-4f - float(log(dist.stats.total))) {}

    __device__ __forceinline__ float ceiling(float top) const {
        float log_p = fmaxf((top - dist.stats.peak) * slope, -1e30f);
        return log_p + shift + fabsf(log_p) * 1e-6f;
    }
    __device__ __forceinline__ float known() const { return -INFINITE; }
    __device__ __forceinline__ bool value(float x, int token, float& out) const {
        if (!dist.kept(x)) return false;
        float q = proposed ? proposed[token] : (token == draft ? 1.0f : 0.0f);
        q = q > 0.0f ? q : 0.0f;
        if (exp2_approx(ceiling(x) * 1.4426950f) + 1e-37f <= q) return false;
        float residual = dist.probability(x) - q;
        out = float(log(double(residual)));
        return residual > 0.0f;
    }
};

// A possible winner: its sum with the noise to about six digits, its value, and the random word.
struct Contender {
    float sum, x;
    u32 word;
    int token;  // -1: none

    static __device__ __forceinline__ Contender none() { return {-INFINITE, 0.0f, 0u, -1}; }
};

// Evaluate the tokens of one group that pass the bound. Few do.
template <class Group, class Source>
__device__ __forceinline__ void examine(const Group& group, const u32 (&words)[8], int token, const Source& source,
                                        float slope, float least, Contender& best) {
    least = fmaxf(least, best.sum - source.scaling.slack(best.sum));
    u32 passing = 0;
#pragma unroll
    for (int i = 0; i < 8; i++)
        if (may_exceed(words[i], exp2_approx((source.ceiling(group.at(i)) - least) * slope))) passing |= 1u << i;
#pragma unroll 1
    for (; passing; passing &= passing - 1) {
        int place = __ffs(passing) - 1;
        float raw = group.at(0), x;
        u32 word = words[0];
#pragma unroll
        for (int i = 1; i < 8; i++)
            if (i == place) raw = group.at(i), word = words[i];
        if (!source.value(raw, token + place, x)) continue;
        Contender other = {source.scaling.sum(x, word), x, word, token + place};
        float margin = source.scaling.tolerance(other.sum);
        bool wins = best.token < 0 || other.sum > best.sum + margin;
        if (!wins && other.sum >= best.sum - margin)
            wins = source.scaling.exact(x, word) > source.scaling.exact(best.x, best.word);
        if (wins) best = other;
    }
}

template <class Group>
__device__ __forceinline__ float low_bound(const Group& group, const Scaling& scaling, const u32 (&words)[8]) {
    float low = -INFINITE;
#pragma unroll
    for (int i = 0; i < 8; i++) {
        float x = group.at(i);
        float sum = fmaf(scaling.noise_scale * 0.6931471f, gumbel_low_log2(words[i]), x * scaling.x_scale);
        low = finite(x) ? fmaxf(low, sum) : low;
    }
    return low;
}

// The highest sum that some token of the row is known to reach. Threads read and raise it in any order: a thread that
// sees an older bound evaluates more than it must, and finds the same winner.
struct SharedBound {
    u32* key;  // in shared memory

    __device__ __forceinline__ float get() const {  // the same for a warp
        return unordered(__shfl_sync(ALL_LANES, *(volatile u32*)key, 0));
    }
    __device__ __forceinline__ void raise(float sum) const {
        u32 highest = __reduce_max_sync(ALL_LANES, ordered(sum));
        if ((threadIdx.x & 31) == 0) atomicMax(key, highest);
    }
};

// The winner of a block, from the best of each of its threads, whose sums have raised the bound. None if the row has a
// better token elsewhere. Sums are accurate to six digits: several that close are compared exactly.
__device__ __forceinline__ Contender block_winner(const Contender& best, const Scaling& scaling,
                                                  const SharedBound& bound) {
    __shared__ Contender winner;
    __syncthreads();
    float highest = bound.get();
    bool contends = best.token >= 0 && best.sum >= highest - scaling.slack(highest);
    if (threadIdx.x == 0) winner = Contender::none();
    if (__syncthreads_count(contends) > 1) {
        Best first = block_best(contends ? Best{scaling.exact(best.x, best.word), best.token} : Best{0.0, -1});
        contends = contends && best.token == first.token;
    }
    if (contends) winner = best;
    __syncthreads();
    return winner;
}

// The random words of a group, by the ids of its tokens.
template <class T>
__device__ __forceinline__ void words_of(const Row<T>& row, const Noise& noise, int index, u32 (&words)[8]) {
    if (!row.ids) return noise.words(index, words);
#pragma unroll
    for (int i = 0; i < 8; i++) words[i] = noise.word(row.ids[min(8 * index + i, row.vocab - 1)]);
}

// The winner of groups [first, last) of a row; every thread of the block calls it and gets the result. `next` is the
// group at first + threadIdx.x, loaded earlier.
template <class T, class Source>
__device__ __forceinline__ Contender draw_part(const Row<T>& row, const Source& source, const Noise& noise, int first,
                                               int last, typename Row<T>::Incoming next) {
    __shared__ u32 key;
    SharedBound shared = {&key};
    __syncthreads();  // an earlier call may still read it
    if (threadIdx.x == 0) key = ordered(source.known());
    __syncthreads();

    const Scaling& scaling = source.scaling;
    const float slope = fminf(1.4426950f / scaling.noise_scale, 1e38f);
    const float lowest = source.dist.lowest();
    Contender best = Contender::none();
#pragma unroll 1
    for (int base = first; base < last; base += blockDim.x) {
        int index = base + threadIdx.x;
        typename Row<T>::Group group = next.take();
        next = row.fetch(index + blockDim.x, last);
        float bound = shared.get();
        float top = group.top();
        float ceiling = source.ceiling(top);
        float least = bound - scaling.slack(bound);
        bool possible = top > -INFINITE && top >= lowest && !(ceiling < least - NOISE_HIGH * scaling.noise_scale);
        u32 words[8];
        if (possible) words_of(row, noise, index, words);
        if (Source::bootstraps) {
            // Before the first sum: a cheap lower bound, so that few of the first tokens are evaluated.
            if (bound == -INFINITE) shared.raise(possible ? low_bound(group, scaling, words) : -INFINITE);
            if (base == first) __syncthreads();
            bound = shared.get();
            least = bound - scaling.slack(bound);
        }
        bool news = false;
        if (possible) {
            u32 high = max(max(max(words[0], words[1]), max(words[2], words[3])),
                           max(max(words[4], words[5]), max(words[6], words[7])));
            if (may_exceed(high, exp2_approx((ceiling - least) * slope))) {
                float before = best.sum;
                examine(group, words, 8 * index, source, slope, least, best);
                news = best.sum > before;
            }
        }
        if (__any_sync(ALL_LANES, news)) shared.raise(best.sum);
    }
    return block_winner(best, scaling, shared);
}

// The largest finite logit of groups [first, last); the first of equals. As draw_part.
template <class T>
__device__ __forceinline__ Contender greedy_part(const Row<T>& row, int first, int last,
                                                 typename Row<T>::Incoming next) {
    __shared__ u32 key;
    SharedBound shared = {&key};
    __syncthreads();
    if (threadIdx.x == 0) key = ordered(-INFINITE);
    __syncthreads();

    Contender best = Contender::none();
    auto look = [&](const typename Row<T>::Group& group, int index) {
        if (!(group.top() > best.sum)) return;
#pragma unroll
        for (int i = 0; i < 8; i++) {
            float x = group.at(i);
            if (x > best.sum && finite(x)) best = {x, x, 0u, 8 * index + i};
        }
    };
    int index = first + threadIdx.x;
    look(next.take(), index);
    const int ahead = 4;
#pragma unroll 1
    for (index += blockDim.x; index < last; index += ahead * blockDim.x) {
        typename Row<T>::Incoming held[ahead];
#pragma unroll
        for (int i = 0; i < ahead; i++) held[i] = row.fetch(index + i * blockDim.x, last);
#pragma unroll
        for (int i = 0; i < ahead; i++) look(held[i].take(), index + i * blockDim.x);
    }
    shared.raise(best.sum);
    return block_winner(best, Scaling(0.0f), shared);
}
