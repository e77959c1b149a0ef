// Filter statistics of a row: peak, threshold, normalizer. One block per row; several may count its values. Every
// sum is of integers or in a fixed order, so equal rows give equal bits.
//
// A filter is a threshold: going down from the largest score, the first one at which the tokens so far number top-k, or
// hold top-p of the mass. A histogram of the scores finds its bin, a histogram of the scores within that bin the next,
// until a bin is one score. bf16 logits have so few values that one histogram of the values suffices. Top-k counts all
// tokens, because those that top-n-sigma removes are the last ones.
#pragma once
#include "request.cuh"

#define BINS 2048
#define BIN_WIDTH 0.015625f  // of the first histogram: it covers scores down to -32; further ones go by float bits

// bf16 magnitudes from 2^-24 to 2^9 have a bin per value: positive, zero, negative, and one for all below -2^9.
#define BF16_LOW (103 << 7)
#define BF16_HIGH (136 << 7)
#define BF16_SIGN (BF16_HIGH - BF16_LOW)
#define BF16_BINS (2 * BF16_SIGN + 2)
#define BF16_ODD BF16_BINS           // number of values that one of those bins does not distinguish
#define BF16_COUNTS (BF16_BINS + 2)  // all counts, a multiple of four

// Masses are in units of 2^-44: a row of 2^19 equal logits fits into 64 bits, and 1e-13 of the peak counts.
#define MASS_UNIT 17592186044416.0
#define SIGMA_UNITS 274877906944.0  // of engines/contract/sampling_parameters.py

struct Histogram {
    u32 low[BF16_COUNTS];  // of 64-bit sums, or counts
    u32 high[BINS];
};

__device__ __forceinline__ void add(Histogram& histogram, int bin, u64 weight) {
    u32 low = u32(weight), high = u32(weight >> 32);
    if (low && atomicAdd(&histogram.low[bin], low) > ~low) high++;
    if (high) atomicAdd(&histogram.high[bin], high);
}

__device__ __forceinline__ void clear(u32* words, int count) {
    for (int i = threadIdx.x; i < count; i += blockDim.x) words[i] = 0;
}

// Call `visit(logit)` for every finite, allowed logit of groups [first, last). `Ahead` groups of a thread are in flight
// at a time; `visit` is unrolled 8 * Ahead times if it is small, else once.
template <int Ahead, class T, class Visit>
__device__ __forceinline__ void each_logit(const Row<T>& row, int first, int last, Visit visit) {
#pragma unroll 1
    for (int base = first; base < last; base += Ahead * blockDim.x) {
        typename Row<T>::Incoming held[Ahead];
#pragma unroll
        for (int i = 0; i < Ahead; i++) held[i] = row.fetch(base + i * blockDim.x + threadIdx.x, last);
#pragma unroll
        for (int i = 0; i < Ahead; i++) {
            typename Row<T>::Group group = held[i].take();
#pragma unroll(Ahead == 1 ? 1 : 8)
            for (int j = 0; j < 8; j++, group.rotate()) {
                float x = group.front();
                if (finite(x)) visit(x);
            }
        }
    }
}

template <int Ahead, class T, class Visit>
__device__ __forceinline__ void each_logit(const Row<T>& row, Visit visit) {
    each_logit<Ahead>(row, 0, row.groups(), visit);
}

// A warp: the sum of this lane's value and those of the lanes below.
__device__ __forceinline__ u64 running_sum(u64 value) {
    for (int offset = 1; offset < 32; offset <<= 1) {
        u64 below = __shfl_up_sync(ALL_LANES, value, offset);
        if ((threadIdx.x & 31) >= offset) value += below;
    }
    return value;
}

// Where the running sum of `weight(bin)` over bins [first, last) first reaches a target.
struct Found {
    int bin;     // last, if it never does
    u64 before;  // the sum of the bins before it
};

// `target(total)` gives the target. Each warp has a run of neighbouring bins.
template <class Weight, class Target>
__device__ __forceinline__ Found first_reaching(int first, int last, Weight weight, Target target) {
    __shared__ u64 warp_sums[32];
    __shared__ Found found;
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    int each = (last - first + blockDim.x - 1) / blockDim.x * 32;
    int begin = first + warp * each, end = min(begin + each, last);
    u64 mine = 0;
#pragma unroll 1
    for (int bin = begin + lane; bin < end; bin += 32) mine += weight(bin);
    mine = __shfl_sync(ALL_LANES, running_sum(mine), 31);
    __syncthreads();
    if (lane == 0) warp_sums[warp] = mine;
    if (threadIdx.x == 0) found = {last, 0};
    __syncthreads();
    u64 until = running_sum(lane < int(blockDim.x >> 5) ? warp_sums[lane] : 0);
    u64 goal = target(__shfl_sync(ALL_LANES, until, 31)), before = __shfl_sync(ALL_LANES, until, warp) - mine;
    if (before < goal && before + mine >= goal) {
        u32 reached = 0;
#pragma unroll 1
        for (int bin = begin; !reached; bin += 32) {
            until = before + running_sum(bin + lane < end ? weight(bin + lane) : 0);
            reached = __ballot_sync(ALL_LANES, until >= goal);
            int place = __ffs(reached) - 1;
            u64 below = __shfl_sync(ALL_LANES, until, max(place - 1, 0));
            if (reached && lane == 0) found = {bin + place, place ? below : before};
            before = __shfl_sync(ALL_LANES, until, 31);
        }
    }
    __syncthreads();
    return found;
}

// The first of `bins` with a count, or `bins` if there is none.
__device__ __forceinline__ int first_counted(const u32* counts, int bins) {
    __shared__ int first;
    if (threadIdx.x == 0) first = bins;
    __syncthreads();
    int bin = threadIdx.x;
    while (bin < bins && !counts[bin]) bin += blockDim.x;
    bin = __reduce_min_sync(ALL_LANES, min(bin, bins));
    if ((threadIdx.x & 31) == 0) atomicMin(&first, bin);
    __syncthreads();
    return first;
}

__device__ __forceinline__ u64 mass(float score) { return u64(double(expf(score)) * MASS_UNIT + 0.5); }

__device__ __forceinline__ u64 goal_of(float top_p, u64 total) { return u64(ceil(double(top_p) * double(total))); }

// The standard deviation of a row's logits, as standard_deviation() in reference/filters.py defines it: sums of
// integers.
struct Spread {
    double peak, extent, scale;
    u64 count, distances, squares;  // in units of the extent, and of its square

    __device__ __forceinline__ Spread(float peak, float lowest)
        : peak(peak), extent(double(peak) - double(lowest)), scale(1.0 / (extent > 0.0 ? extent : 1.0)), count(0),
          distances(0), squares(0) {}

    __device__ __forceinline__ void add(float x, u64 times) {
        double distance = (peak - double(x)) * scale;
        count += times;
        distances += times * u64(__double2ll_rn(distance * SIGMA_UNITS));
        squares += times * u64(__double2ll_rn(distance * distance * SIGMA_UNITS));
    }
    // All threads: the smallest score at most `n` deviations below the peak. __dmul_rn: the compiler must not fuse the
    // difference.
    __device__ __forceinline__ float threshold(float n, float temperature) const {
        double all = double(block_sum(count)), mean = double(block_sum(distances)) / all / SIGMA_UNITS;
        double variance = double(block_sum(squares)) / all / SIGMA_UNITS - __dmul_rn(mean, mean);
        double sigma = extent * sqrt(fmax(variance, 0.0));
        return __double2float_ru(-(double(n) * sigma) / double(temperature));
    }
};

// The smallest score that top-n-sigma keeps. Not inline, so that it takes no registers of requests without this filter.
template <class T>
__device__ __noinline__ float deviation_threshold(Row<T> row, float peak, float n, float temperature) {
    float lowest = peak;
    each_logit<4>(row, [&](float x) { lowest = fminf(lowest, x); });
    Spread spread(peak, -block_max(-lowest));
    each_logit<1>(row, [&](float x) { spread.add(x, 1); });
    return spread.threshold(n, temperature);
}

// The smallest score whose probability is at least min_p times that of the peak.
__device__ __forceinline__ float relative_threshold(float min_p) {
    if (!(min_p > 0.0f)) return -INFINITE;
    float score = float(log(double(min_p)));
    float below = __int_as_float(__float_as_int(score) + (score == 0.0f ? 0x80000001 : 1));  // away from zero
    if (exp(double(below)) >= double(min_p)) return below;
    if (exp(double(score)) >= double(min_p)) return score;
    return __int_as_float(__float_as_int(score) - 1);
}

// The score at which the running weight first reaches the target, by ever finer histograms of -score.
template <class T, class Weight, class Target>
__device__ __forceinline__ float select_score(const Row<T>& row, const Distribution& dist, Histogram& histogram,
                                              Weight weight, Target target) {
    u32 low = 0, high = 0x7f800000u;  // float bits of -score: the range that holds the answer
    u64 passed = 0, goal = 0;
    for (int level = 0;; level++) {
        int shift = 0;
        while ((high - low) >> shift >= BINS) shift++;
        clear(histogram.low, BINS);
        clear(histogram.high, BINS);
        __syncthreads();
        each_logit<1>(row, [&](float x) {
            if (!dist.kept(x)) return;
            float score = dist.score(x);
            u32 key = __float_as_uint(-score) & 0x7fffffffu;
            if (key < low || key > high) return;
            int bin = level ? int((key - low) >> shift) : int(fminf(-score * (1.0f / BIN_WIDTH), BINS - 1.0f));
            add(histogram, bin, weight(score));
        });
        __syncthreads();
        Found found = first_reaching(
            0, BINS, [&](int bin) { return u64(histogram.high[bin]) << 32 | histogram.low[bin]; },
            [&](u64 total) { return level ? goal - passed : (goal = target(total)); });
        if (found.bin == BINS) return -INFINITE;  // fewer tokens than top-k: all are kept
        passed += found.before;
        if (level) {
            low += u32(found.bin) << shift;
            if (shift == 0) return -__uint_as_float(low);
            high = min(high, low + ((1u << shift) - 1));
        } else {  // the bounds of the bin, a little wide; values outside have been passed or are not reached
            low = __float_as_uint(found.bin * BIN_WIDTH);
            high = found.bin == BINS - 1 ? high : __float_as_uint((found.bin + 1) * BIN_WIDTH) - 1;
        }
    }
}

template <class T>
__device__ __forceinline__ void general_stats(const Row<T>& row, const Request& request, bool normalise,
                                              Distribution& dist, Histogram& histogram) {
    float peak = -INFINITE;
    each_logit<4>(row, [&](float x) { peak = fmaxf(peak, x); });
    dist.stats.peak = block_max(peak);
    dist.stats.threshold = -INFINITE;
    if (dist.stats.peak == -INFINITE) return;
    if (request.top_k > 0)
        dist.stats.threshold =
            select_score(row, dist, histogram, [](float) { return u64(1); }, [&](u64) { return u64(request.top_k); });
    if (request.top_n_sigma > 0.0f)
        dist.stats.threshold = fmaxf(
            dist.stats.threshold, deviation_threshold(row, dist.stats.peak, request.top_n_sigma, request.temperature));
    if (request.top_p > 0.0f)
        dist.stats.threshold =
            fmaxf(dist.stats.threshold,
                  select_score(row, dist, histogram, mass, [&](u64 total) { return goal_of(request.top_p, total); }));
    dist.stats.threshold = fmaxf(dist.stats.threshold, relative_threshold(request.min_p));
    if (!normalise) return;
    double total = 0.0;
    each_logit<1>(row, [&](float x) {
        if (dist.kept(x)) total += double(expf(dist.score(x)));
    });
    dist.stats.total = block_sum(total);
}

// Count the values of groups [first, last), in the place where `value_stats` reads counts. The block is synchronized
// afterwards.
template <class T>
__device__ __forceinline__ void count_values(const Row<T>&, int, int, Histogram&) {}

__device__ __forceinline__ void count_values(const Row<bf16>& row, int first, int last, Histogram& histogram) {
    u32* counts = histogram.low;
    clear(counts, BF16_COUNTS);
    __syncthreads();
    each_logit<2>(row, first, last, [&](float x) {
        int magnitude = int(__float_as_uint(x) >> 16 & 0x7fff), bin = BF16_SIGN;
        if (magnitude && (magnitude < BF16_LOW || magnitude >= BF16_HIGH)) {
            bin = BF16_BINS - 1;
            if (magnitude < BF16_LOW || x > 0.0f) atomicAdd(&counts[BF16_ODD], 1u);
        } else if (magnitude) {
            bin = x > 0.0f ? BF16_HIGH - 1 - magnitude : BF16_SIGN + 1 + magnitude - BF16_LOW;
        }
        atomicAdd(&counts[bin], 1u);
    });
    __syncthreads();
}

// The logit of a bin that has one.
__device__ __forceinline__ float logit(int bin) {
    int magnitude = bin < BF16_SIGN ? BF16_HIGH - 1 - bin : bin == BF16_SIGN ? 0 : bin - BF16_SIGN - 1 + BF16_LOW;
    return __uint_as_float(u32(magnitude) << 16 | (bin > BF16_SIGN ? 0x80000000u : 0u));
}

// As above, from the counts of a row whose largest logit is in bin `top`, and none in the last bin.
__device__ __noinline__ float deviation_threshold(const u32* counts, int top, float n, float temperature) {
    float lowest = logit(top);
    for (int bin = top + threadIdx.x; bin < BF16_BINS - 1; bin += blockDim.x)
        if (counts[bin]) lowest = fminf(lowest, logit(bin));
    Spread spread(logit(top), -block_max(-lowest));
    for (int bin = top + threadIdx.x; bin < BF16_BINS - 1; bin += blockDim.x)
        if (counts[bin]) spread.add(logit(bin), counts[bin]);
    return spread.threshold(n, temperature);
}

// From the counts of all of a row's values. Returns false if some values share a bin.
__device__ __forceinline__ bool value_stats(const Row<bf16>&, const Request& request, bool normalise,
                                            Distribution& dist, const Histogram& histogram) {
    const u32* counts = histogram.low;
    if (counts[BF16_ODD]) return false;
    const int far = BF16_BINS - 1;  // its contents must not matter
    dist.stats.threshold = -INFINITE;
    dist.stats.peak = -INFINITE;
    int top = first_counted(counts, BF16_BINS), end = far;  // bins [top, end) may be kept
    if (top == BF16_BINS) return true;
    dist.stats.peak = logit(top);
    if (top == far || (counts[far] && dist.score(logit(far)) > -60.0f)) return false;

    if (request.top_k > 0) {
        Found found = first_reaching(
            top, BF16_BINS, [&](int bin) { return u64(counts[bin]); }, [&](u64) { return u64(request.top_k); });
        if (found.bin == far) return false;
        if (found.bin < far) {
            dist.stats.threshold = dist.score(logit(found.bin));
            end = found.bin + 1;
            while (end < far && dist.score(logit(end)) >= dist.stats.threshold) end++;  // other logits, the same score
        }
    }
    if (request.top_n_sigma > 0.0f) {
        if (counts[far]) return false;
        float least = deviation_threshold(counts, top, request.top_n_sigma, request.temperature);
        dist.stats.threshold = fmaxf(dist.stats.threshold, least);
        for (int first = top; first < end;) {
            int middle = (first + end) / 2;
            if (dist.score(logit(middle)) < least) end = middle;
            else first = middle + 1;
        }
    }
    if (request.top_p > 0.0f) {
        Found found = first_reaching(
            top, end, [&](int bin) { return counts[bin] ? counts[bin] * mass(dist.score(logit(bin))) : 0; },
            [&](u64 total) { return goal_of(request.top_p, total); });
        dist.stats.threshold = dist.score(logit(found.bin));
    }
    dist.stats.threshold = fmaxf(dist.stats.threshold, relative_threshold(request.min_p));
    if (!normalise) return true;
    double total = 0.0;
#pragma unroll 1
    for (int bin = top + threadIdx.x; bin < end; bin += blockDim.x)
        if (counts[bin] && dist.score(logit(bin)) >= dist.stats.threshold)
            total += counts[bin] * exp(double(dist.score(logit(bin))));
    dist.stats.total = block_sum(total);
    return true;
}

template <class T>
__device__ __forceinline__ bool value_stats(const Row<T>&, const Request&, bool, Distribution&, const Histogram&) {
    return false;
}

// The distribution of a row whose values were counted. `normalise`: its total is needed, by the rejection rule or to
// write the probabilities.
template <class T>
__device__ __forceinline__ Distribution row_distribution(const Row<T>& row, const Request& request, bool normalise,
                                                         Histogram& histogram) {
    Distribution dist = {{1.0, -INFINITE, -INFINITE, 0, 0}, request.temperature, false};
    dist.filtered = true;  // during the search, by the threshold found so far
    if (!value_stats(row, request, normalise, dist, histogram)) general_stats(row, request, normalise, dist, histogram);
    dist.filtered = request.filtered;
    return dist;
}

// The rejection rule: whether the draft of `row` is accepted, and whether it has a distribution. All threads call it
// together.
template <class T>
__device__ __forceinline__ void judge(const Row<T>& row, const Request& request, const Drafts& drafts, int index,
                                      Distribution& dist) {
    i64 draft = drafts.tokens[index];
    bool inside = draft >= 0 && draft < row.vocab;
    const float* proposed = drafts.of_row(index, row.vocab);
    float q = inside ? 1.0f : 0.0f;
    if (proposed && inside) {
        float own = proposed[draft];
        bool drawn = own > 0.0f;
        // A row of zeros: no distribution, or one that excludes its own draft.
        if (!drawn) {
            bool any = false;
#pragma unroll 1
            for (int token = threadIdx.x; token < row.vocab; token += blockDim.x) any = any || proposed[token] > 0.0f;
            drawn = __syncthreads_or(any);
        }
        dist.stats.drawn = drawn;
        if (drawn) q = own > 0.0f ? own : 0.0f;
    }
    if (!inside || dist.stats.peak == -INFINITE) return;
    u32 words[4];
    Noise(request.seed, request.position + index, ACCEPT).quad(0, words);
    dist.stats.stands = uniform(words[0]) * double(q) < double(dist.probability(row.at(int(draft))));
}
