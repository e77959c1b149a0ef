// The token of a row with the largest logit (greedy), or with the largest score + noise (sampled).
//
// A sampled draw compares x / temperature + g over the tokens. Most tokens cannot win, and it costs two bounds to say
// so: noise lies in [-2.87, 17.34], and 1 - u <= -ln u. Only what they let pass is evaluated, in float32, and only
// contenders too close for that in float64. So the winner does not depend on how a row is cut into parts.
#pragma once
#include "logits.cuh"
#include "noise.cuh"
#include "reduce.cuh"

// What a row's filters leave, and what its draft is worth under the rejection rule (row_stats).
struct Stats {
    double total;     // sum of exp(score) over the tokens that are kept
    float peak;       // largest finite logit, -infinity if there is none
    float threshold;  // smallest score that is kept
    int stands;       // the row's draft is accepted
    int drawn;        // the draft has a law (else it is one-hot)
};

// Scores are (logit - peak) / temperature, float32, as reference/filters.py has them.
struct Law {
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
    // No logit below this one is kept; a little low, for rounding.
    __device__ __forceinline__ float lowest() const {
        float reach = stats.threshold * temperature;
        return filtered ? stats.peak + reach - (fabsf(reach) + fabsf(stats.peak)) * 1e-6f : -INFINITE;
    }
};

// Draw from the scores themselves. Units: those of the logits, or of scores above temperature 1, so nothing overflows.
struct FromScores {
    static const bool bootstraps = true;
    Law law;
    float x_scale, noise_scale;

    __device__ __forceinline__ FromScores(const Law& law)
        : law(law),
          x_scale(law.temperature > 1.0f ? 1.0f / law.temperature : 1.0f),
          noise_scale(law.temperature > 1.0f ? 1.0f : law.temperature) {}

    __device__ __forceinline__ float ceiling(float top) const { return top * x_scale; }
    // What some token of the whole row reaches: the peak is always kept.
    __device__ __forceinline__ float known() const {
        return law.filtered ? law.stats.peak * x_scale + NOISE_LOW * noise_scale : -INFINITE;
    }
    __device__ __forceinline__ bool value(float x, int, float& out) const {
        out = x;
        return law.kept(x);
    }
    __device__ __forceinline__ double exact(float x, u32 word) const {
        double scaled = law.temperature > 1.0f ? double(x) / double(law.temperature) : double(x);
        return scaled + double(noise_scale) * double(gumbel(word));
    }
};

// Draw from the residual max(p - q, 0) of a draft that was refused: the scores are its logarithms.
struct FromResidual {
    static const bool bootstraps = false;
    static constexpr float x_scale = 1.0f, noise_scale = 1.0f;
    Law law;
    const float* proposed;  // the row's law in draft_probs; null: one-hot
    i64 draft;
    float slope, shift;  // of the bound: ln p = slope * (x - peak) - ln total

    __device__ __forceinline__ FromResidual(const Law& law, const float* proposed, i64 draft)
        : law(law), proposed(proposed), draft(draft), slope(fminf(1.0f / law.temperature, 1e38f)),
          shift(1e-4f - float(log(law.stats.total))) {}

    __device__ __forceinline__ float ceiling(float top) const {
        float log_p = fmaxf((top - law.stats.peak) * slope, -1e30f);
        return log_p + shift + fabsf(log_p) * 1e-6f;
    }
    __device__ __forceinline__ float known() const { return -INFINITE; }
    __device__ __forceinline__ bool value(float x, int token, float& out) const {
        if (!law.kept(x)) return false;
        float q = proposed ? proposed[token] : (token == draft ? 1.0f : 0.0f);
        q = q > 0.0f ? q : 0.0f;
        if (exp2_approx(ceiling(x) * 1.4426950f) + 1e-37f <= q) return false;
        float residual = law.probability(x) - q;
        out = float(log(double(residual)));
        return residual > 0.0f;
    }
    __device__ __forceinline__ double exact(float x, u32 word) const { return double(x) + double(gumbel(word)); }
};

// One that may win: its value, the random word, and their sum to about six digits.
struct Contender {
    float sum, x;
    u32 word;
    int token;
};

__device__ __forceinline__ float tolerance(float sum, float noise_scale) {
    return noise_scale * 8e-6f + fabsf(sum) * 5e-7f;
}

// Evaluate the tokens of one group that the bound lets pass. Rare, so small rather than fast.
template <class Group, class Source>
__device__ __forceinline__ void examine(Group group, u32* words, int token, const Source& source, float slope,
                                        float least, Contender& best) {
#pragma unroll 1
    for (int i = 0; i < 8; i++, token++) {
        float raw = group.front(), x;
        u32 word = words[0];
        group.rotate();
#pragma unroll
        for (int j = 0; j < 7; j++) words[j] = words[j + 1];
        float mine = best.sum - (source.noise_scale * 1e-4f + fabsf(best.sum) * 1e-6f);
        float over = source.ceiling(raw) - fmaxf(least, mine);
        if (!may_exceed(word, exp2_approx(over * slope)) || !source.value(raw, token, x)) continue;
        Contender other = {fmaf(source.noise_scale, gumbel_approx(word), x * source.x_scale), x, word, token};
        float margin = tolerance(other.sum, source.noise_scale);
        bool wins = best.token < 0 || other.sum > best.sum + margin;
        if (!wins && other.sum >= best.sum - margin) wins = source.exact(x, word) > source.exact(best.x, best.word);
        if (wins) best = other;
    }
}

template <class Group, class Source>
__device__ __forceinline__ float low_bound(Group group, const Source& source, const u32* words) {
    float low = -INFINITE;
#pragma unroll
    for (int i = 0; i < 8; i++) {
        float x = group.front();
        group.rotate();
        float sum = fmaf(source.noise_scale * 0.6931471f, gumbel_low_log2(words[i]), x * source.x_scale);
        low = finite(x) ? fmaxf(low, sum) : low;
    }
    return low;
}

template <class T>
__device__ __forceinline__ void fetch(const Row<T>& row, int index, int last, typename Row<T>::Group& group) {
    if (index < last) group = row.group(index);
    else group.clear();
}

// The best of groups [first, last) of a row; every thread of the block calls it and gets the answer.
template <class T, class Source>
__device__ __forceinline__ Best draw_part(const Row<T>& row, const Source& source, const Noise& noise, int first,
                                          int last) {
    __shared__ u32 shared_bound;  // a sum that some token of the row reaches
    if (threadIdx.x == 0) shared_bound = ordered(source.known());
    __syncthreads();

    const float scale = source.noise_scale;
    const float slope = fminf(1.4426950f / scale, 1e38f);
    const float lowest = source.law.lowest();
    Contender best = {-INFINITE, 0.0f, 0u, -1};

    typename Row<T>::Group next;
    fetch(row, first + threadIdx.x, last, next);
#pragma unroll 1
    for (int base = first; base < last; base += blockDim.x) {
        int index = base + threadIdx.x;
        typename Row<T>::Group group = next;
        fetch(row, index + blockDim.x, last, next);
        float bound = unordered(__shfl_sync(ALL_LANES, *(volatile u32*)&shared_bound, 0));
        float top = group.top();
        float ceiling = source.ceiling(top);
        // Slack for the rounding of all that is compared with it.
        float least = bound - (scale * 1e-4f + fabsf(bound) * 1e-6f);
        bool possible = top > -INFINITE && top >= lowest && !(ceiling < least - NOISE_HIGH * scale);
        u32 words[8];
        if (possible) {
            noise.words(2 * index, words);
            noise.words(2 * index + 1, words + 4);
        }
        if (Source::bootstraps && bound == -INFINITE) {
            // Nothing is known yet: a cheap bound from below, so that few of the first tokens are evaluated.
            float low = possible ? low_bound(group, source, words) : -INFINITE;
            bound = unordered(__reduce_max_sync(ALL_LANES, ordered(low)));
            least = bound - (scale * 1e-4f + fabsf(bound) * 1e-6f);
            if ((threadIdx.x & 31) == 0) atomicMax(&shared_bound, ordered(bound));
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
        if (__any_sync(ALL_LANES, news)) {
            u32 highest = __reduce_max_sync(ALL_LANES, ordered(best.sum));
            if ((threadIdx.x & 31) == 0) atomicMax(&shared_bound, highest);
        }
    }
    // Sums are good to six digits: whoever is that close to the largest is compared exactly.
    float close = block_max(best.sum);
    close -= 2.0f * tolerance(close, scale);
    bool contends = best.token >= 0 && best.sum >= close;
    return block_best(contends ? Best{source.exact(best.x, best.word), best.token} : Best{0.0, -1});
}

// The largest finite logit of groups [first, last); the first of equals.
template <class T>
__device__ __forceinline__ Best greedy_part(const Row<T>& row, int first, int last) {
    float best = -INFINITE;
    int token = -1;
    typename Row<T>::Group next;
    fetch(row, first + threadIdx.x, last, next);
#pragma unroll 1
    for (int index = first + threadIdx.x; index < last; index += blockDim.x) {
        typename Row<T>::Group group = next;
        fetch(row, index + blockDim.x, last, next);
        if (!(group.top() > best)) continue;
#pragma unroll
        for (int i = 0; i < 8; i++, group.rotate()) {
            float x = group.front();
            if (x > best && finite(x)) best = x, token = 8 * index + i;
        }
    }
    return block_best(Best{double(best), token});
}
