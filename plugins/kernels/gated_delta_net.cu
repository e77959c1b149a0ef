// gated_delta_net in two kernels. `convolve` computes queries, keys, values, decay and rate of every token, replayed ones
// included, in parallel; `scan` (recurrence.cuh) goes through the tokens of a run.
//
// convolve_<dtype>_<D | channels_D>: 128 threads, grid (replays * runs + tokens, key_heads); D is the size of a key.
// scan_<dtype>_<D | channels_D>: 64 threads; "channels": one decay per key channel.

#include "recurrence.cuh"
#include "variants.cuh"

constexpr int MAX_KERNEL = 8;

__device__ inline float sum_of_warp(float x) {
    for (int distance = 16; distance; distance /= 2) x = __fadd_rn(x, __shfl_xor_sync(0xffffffffu, x, distance));
    return x;
}

__device__ inline float sigmoid(float x) { return __fdiv_rn(1.0f, 1.0f + expf(-x)); }

// The rows of `mixed` that a token's convolution reads, oldest first; null before the beginning of the text.
template <class T>
struct Taps {
    const typename T::Element* rows[MAX_KERNEL];
};

// Two neighbouring channels of the causal convolution, with SiLU.
template <class T>
__device__ float2 convolved(const Taps<T>& taps, const typename T::Element* weight, int kernel, int channel) {
    float2 sum = make_float2(0, 0);
    for (int tap = 0; tap < kernel; ++tap) {
        if (!taps.rows[tap]) continue;
        float2 x = T::load2(taps.rows[tap] + channel);
        sum.x = fmaf(x.x, T::load1(weight + channel * kernel + tap), sum.x);
        sum.y = fmaf(x.y, T::load1(weight + (channel + 1) * kernel + tap), sum.y);
    }
    return make_float2(__fmul_rn(sum.x, sigmoid(sum.x)), __fmul_rn(sum.y, sigmoid(sum.y)));
}

// A warp's query or key, as a unit vector times `scale`.
template <class T, int KD>
__device__ void convolve_unit(const Taps<T>& taps, const typename T::Element* weight, int kernel, int channel,
                              float scale, float* to) {
    constexpr int PAIRS = (KD + 63) / 64;
    int lane = threadIdx.x % 32;
    float2 x[PAIRS];
    float squares = 0;
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) {
        int at = 64 * i + 2 * lane;
        x[i] = at < KD ? convolved<T>(taps, weight, kernel, channel + at) : make_float2(0, 0);
        squares = fmaf(x[i].x, x[i].x, fmaf(x[i].y, x[i].y, squares));
    }
    float by = __fmul_rn(scale, rsqrtf(sum_of_warp(squares) + 1e-6f));
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) {
        int at = 64 * i + 2 * lane;
        if (at < KD) *reinterpret_cast<float2*>(to + channel + at) = make_float2(x[i].x * by, x[i].y * by);
    }
}

template <class T, int KD, bool PER_CHANNEL>
__device__ void convolve(const typename T::Element* mixed, const typename T::Element* recent, const typename T::Element* weight,
                         const float* decay_scale, const float* dt_bias, const Runs& runs, const int* run_of_token,
                         int count, Layout layout, int kernel, int history, float update_scale, float* rows) {
    constexpr int DECAYS = PER_CHANNEL ? KD : 1;
    __shared__ Taps<T> taps;
    int replays = runs.replays * count, entry = blockIdx.x, token = entry - replays;
    int number = token < 0 ? entry / runs.replays : run_of_token ? run_of_token[token] : token / runs.query;
    if (number < 0) return;  // padding
    Run run(runs, number);
    i64 position = token < 0 ? run.index - runs.replays + entry % runs.replays : run.index + token - run.first;
    if (!run.count || position < run.covered) return;
    int width = layout.width(KD, DECAYS);
    if (threadIdx.x < kernel) {
        i64 read = position - (kernel - 1) + threadIdx.x;
        taps.rows[threadIdx.x] = read < 0 ? nullptr
            : read < run.index            ? recent + (run.slot * history + read % history) * width
                                          : mixed + (run.first + read - run.index) * width;
    }
    __syncthreads();

    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, head = blockIdx.y, shared = layout.value_heads / layout.key_heads;
    float* to = rows + static_cast<i64>(entry) * layout.pitch(KD, DECAYS);
    if (warp == 0) convolve_unit<T, KD>(taps, weight, kernel, head * KD, rsqrtf(KD), to);
    if (warp == 1) convolve_unit<T, KD>(taps, weight, kernel, layout.keys(KD) + head * KD, 1, to);
    if (warp < 2) return;
    int values = shared * layout.value_dim, first = 2 * layout.keys(KD) + head * values;
    for (int i = 2 * (threadIdx.x - 64); i < values; i += 128)
        *reinterpret_cast<float2*>(to + first + i) = convolved<T>(taps, weight, kernel, first + i);
    const auto* logits = taps.rows[kernel - 1];
    for (int i = threadIdx.x - 64; i < shared * DECAYS; i += 64) {
        int at = head * shared * DECAYS + i;
        float x = T::load1(logits + layout.channels(KD) + at) + dt_bias[at];
        float softplus = x > 20 ? x : log1pf(expf(x));
        to[layout.channels(KD) + at] = expf(__fmul_rn(decay_scale[at / DECAYS], softplus));
    }
    if (warp == 2 && lane < shared) {
        int at = layout.channels(KD) + layout.value_heads * DECAYS + head * shared + lane;
        to[at] = __fmul_rn(update_scale, sigmoid(T::load1(logits + at)));
    }
}

#define RUNS                                                                                                          \
    const i64 *state_index, const i64 *write_index, const i64 *commit_index, const i64 *slots, const int *starts
#define SIZES int query, int replays, int key_heads, int value_heads, int value_dim, int history
#define GIVEN Runs{state_index, write_index, commit_index, slots, starts, query, replays}
#define LAYOUT Layout{key_heads, value_heads, value_dim}

#define KERNELS_OF(NAME, KIND, T, KD, PER_CHANNEL)                                                                    \
    extern "C" __global__ void __launch_bounds__(128) convolve_##NAME##_##KIND(                                       \
        const T::Element* mixed, const T::Element* recent, const T::Element* conv_weight, const float* decay_scale,   \
        const float* dt_bias, const int* run_of_token, RUNS, SIZES, int runs, int kernel, float update_scale,         \
        float* rows) {                                                                                                \
        convolve<T, KD, PER_CHANNEL>(mixed, recent, conv_weight, decay_scale, dt_bias, GIVEN, run_of_token, runs,     \
                                     LAYOUT, kernel, history, update_scale, rows);                                    \
    }                                                                                                                 \
    extern "C" __global__ void __launch_bounds__(32 * SCAN_WARPS, KD > 96 ? 7 : 8) scan_##NAME##_##KIND(                               \
        const float* rows, const T::Element* mixed, RUNS, SIZES, float* state, T::Element* recent,                    \
        T::Element* out) {                                                                                            \
        scan<T, KD, PER_CHANNEL>(rows, GIVEN, LAYOUT, history, mixed, state, recent, out);                            \
    }
#define KERNELS_FOR(NAME, T, KD)                                                                                      \
    KERNELS_OF(NAME, KD, T, KD, false)                                                                                \
    KERNELS_OF(NAME, channels_##KD, T, KD, true)

IF_BF16(FOR_KEY_DIMS(KERNELS_FOR, bf16, Bf16))
IF_FP16(FOR_KEY_DIMS(KERNELS_FOR, fp16, Fp16))
IF_FP32(FOR_KEY_DIMS(KERNELS_FOR, fp32, Fp32))
