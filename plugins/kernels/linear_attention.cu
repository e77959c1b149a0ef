// linear_attention in three kernels. `convolve` computes queries, keys, values, decays and rates of every token, replayed
// ones included, in parallel; `scan` (recurrence.cuh) goes through the tokens of a run; `finish` gates and norms outputs.
//
// convolve_<dtype>_<kind>: 128 threads, grid (replays * runs + tokens, ceil(jobs / 4)); see convolve
// scan_<dtype>_<kind>: 128 threads
// finish_<dtype>_<kind>: grid (tokens, groups), a power of two of at most 512 threads
// <kind>: delta_<D>, channels_<D> (one decay per key channel) or gated_<D> (no delta rule); D is the size of a key, 256
//   without the delta rule alone.

#include "recurrence.cuh"
#include "reduce.cuh"
#include "variants.cuh"

__device__ inline float sum_of_warp(float x) {
    for (int distance = 16; distance; distance /= 2) x = __fadd_rn(x, __shfl_xor_sync(0xffffffffu, x, distance));
    return x;
}

__device__ inline float sigmoid(float x) { return __fdiv_rn(1.0f, 1.0f + expf(-x)); }

__device__ inline float2 silu(float2 x) {
    return make_float2(__fmul_rn(x.x, sigmoid(x.x)), __fmul_rn(x.y, sigmoid(x.y)));
}

// A warp has one job of a token: query and key of a head, 64 values, or 32 of the decays and rates.
template <class T, class Kind>
__device__ void convolve(const typename T::Element* given, const typename T::Element* recent,
                         const typename T::Element* weight, const float* bias, const float* decay_scale,
                         const float* dt_bias, const Runs& runs, const int* run_of_token, int count,
                         const Layout<Kind>& layout, int kernel, int history, float update_scale, float* rows) {
    constexpr int KD = Kind::KD, PAIRS = (KD + 63) / 64;
    __shared__ Taps<T> taps;
    wait_for_previous();
    begin_next();  // now all kernels before the previous one are complete, so the next may read what they wrote
    int replays = runs.replays * count, entry = blockIdx.x, token = entry - replays;
    int number = token < 0 ? entry / runs.replays : run_of(runs, run_of_token, token);
    if (number < 0) return;  // padding
    Run run(runs, number);
    i64 position = token < 0 ? run.index - runs.replays + entry % runs.replays : run.index + token - run.first;
    if (!run.count || position < run.covered) return;
    if (threadIdx.x < kernel) {
        find_tap(taps, threadIdx.x, run, position, given, layout.given_pitch, recent, layout.width(), history, kernel);
    }
    __syncthreads();

    int lane = threadIdx.x % 32, job = blockIdx.y * 4 + threadIdx.x / 32, shared = layout.shared();
    float* to = rows + static_cast<i64>(entry) * layout.pitch();
    auto convolve_at = [&](int in_ring, int in_given) {  // the ring has the channels in the order of the weights
        return silu(convolved(taps, weight, bias, kernel, in_ring, [&](const typename T::Element* row, bool from_ring) {
            return T::load2(row + (from_ring ? in_ring : in_given));
        }));
    };
    if (job < layout.key_heads) {
        int in_ring[2] = {layout.ring_query() + job * KD, layout.ring_key() + job * KD};
        int parts[2] = {QUERY, KEY}, places[2] = {layout.query() + job * KD, layout.key() + job * KD};
        float2 x[2][PAIRS];
#pragma unroll
        for (int part = 0; part < 2; ++part) {
            int in_given = layout.given[parts[part]].first + job * layout.given[parts[part]].stride;
            float squares = 0;
#pragma unroll
            for (int i = 0; i < PAIRS; ++i) {
                int at = 64 * i + 2 * lane;
                x[part][i] = at < KD ? convolve_at(in_ring[part] + at, in_given + at) : make_float2(0, 0);
                squares = fmaf(x[part][i].x, x[part][i].x, fmaf(x[part][i].y, x[part][i].y, squares));
            }
            // By the delta rule both are unit vectors, and the query is divided by the root of its size.
            float by = Kind::DELTA ? rsqrtf(sum_of_warp(squares) + 1e-6f) : 1;
            if (Kind::DELTA && part == 0) by = __fmul_rn(rsqrtf(KD), by);
#pragma unroll
            for (int i = 0; i < PAIRS; ++i) {
                int at = 64 * i + 2 * lane;
                x[part][i] = product(by, x[part][i]);
                if (at < KD) *reinterpret_cast<float2*>(to + places[part] + at) = x[part][i];
            }
        }
        float dot = 0;
#pragma unroll
        for (int i = 0; i < PAIRS; ++i) dot = fmaf(x[0][i].x, x[1][i].x, fmaf(x[0][i].y, x[1][i].y, dot));
        dot = sum_of_warp(dot);
        if (lane == 0) to[layout.key_query() + job] = dot;
        return;
    }
    job -= layout.key_heads;
    int of_values = (layout.values() + 63) / 64;
    if (job < of_values) {
        int at = 64 * job + 2 * lane;
        if (at < layout.values())
            *reinterpret_cast<float2*>(to + layout.value() + at) =
                convolve_at(layout.ring_value() + at, layout.given_at(VALUE, shared * layout.value_dim, at));
        return;
    }
    int at = 32 * (job - of_values) + lane, decays = layout.value_heads * Kind::DECAYS;
    const auto* own = taps.rows[kernel - 1];
    bool from_ring = taps.recent[kernel - 1];
    if (at < decays) {
        int column = from_ring ? layout.ring_decay() + at : layout.given_at(DECAY, shared * Kind::DECAYS, at);
        float x = T::load1(own + column) + dt_bias[at];
        float step = x > 20 ? x : log1pf(expf(x));
        to[layout.decay() + at] = expf(__fmul_rn(decay_scale[at / Kind::DECAYS], step));
        if (!Kind::DELTA) to[layout.rate() + at] = step;
    } else if (Kind::DELTA && (at -= decays) < layout.value_heads) {
        int column = from_ring ? layout.ring_update() + at : layout.given_at(UPDATE, shared, at);
        to[layout.rate() + at] = __fmul_rn(update_scale, sigmoid(T::load1(own + column)));
    }
}

enum { NO_NORM, NORM_BEFORE_GATE, NORM_AFTER_GATE };

// Gate and norm a group of outputs of a token; the norm's weight is repeated over the outputs.
template <class T, class Kind>
__device__ void finish(const float* mixtures, const typename T::Element* given, const float* weight,
                       const int* run_of_token, const Layout<Kind>& layout, int size, int weights, int norm,
                       int gate_is_sigmoid, float epsilon, typename T::Element* out) {
    begin_next();
    wait_for_previous();
    i64 token = blockIdx.x;
    if (run_of_token && run_of_token[token] < 0) return;  // padding
    int first = blockIdx.y * size, end = min(first + size, layout.values());
    const float* from = mixtures + token * layout.values();
    const auto* row = given + token * layout.given_pitch;
    auto gate = [&](int i) {
        float2 x = T::load2(row + layout.given_at(GATE, layout.shared() * layout.value_dim, i));
        return gate_is_sigmoid ? make_float2(sigmoid(x.x), sigmoid(x.y)) : silu(x);
    };
    auto value = [&](int i) {
        float2 x = *reinterpret_cast<const float2*>(from + i), by = norm == NORM_BEFORE_GATE ? make_float2(1, 1) : gate(i);
        return make_float2(__fmul_rn(x.x, by.x), __fmul_rn(x.y, by.y));
    };
    float scale = 1;
    if (norm != NO_NORM) {
        float squares = 0;
        for (int i = first + 2 * threadIdx.x; i < end; i += 2 * blockDim.x) {
            float2 x = value(i);
            squares = fmaf(x.x, x.x, fmaf(x.y, x.y, squares));
        }
        scale = rsqrtf(__fdiv_rn(block_sum(squares), static_cast<float>(size)) + epsilon);
    }
    for (int i = first + 2 * threadIdx.x; i < end; i += 2 * blockDim.x) {
        float2 x = value(i);
        if (norm != NO_NORM) {
            x = make_float2(x.x * scale * weight[i % weights], x.y * scale * weight[(i + 1) % weights]);
        }
        if (norm == NORM_BEFORE_GATE) {
            float2 by = gate(i);
            x = make_float2(x.x * by.x, x.y * by.y);
        }
        T::store2(out + token * layout.values() + i, x);
    }
}

#define RUNS                                                                                                          \
    const i64 *state_index, const i64 *write_index, const i64 *commit_index, const i64 *slots, const int *starts,     \
        int query, int replays, int history
#define SIZES                                                                                                         \
    int key_heads, int value_heads, int value_dim, int given_pitch, int query_at, int key_at, int value_at,           \
        int decay_at, int update_at, int gate_at, int query_stride, int key_stride, int value_stride,                 \
        int decay_stride, int update_stride, int gate_stride
#define GIVEN Runs{state_index, write_index, commit_index, slots, starts, query, replays}
#define LAYOUT(KIND)                                                                                                  \
    Layout<KIND> {                                                                                                    \
        key_heads, value_heads, value_dim, given_pitch, {                                                             \
            {query_at, query_stride}, {key_at, key_stride}, {value_at, value_stride}, {decay_at, decay_stride},       \
            {update_at, update_stride}, {gate_at, gate_stride}                                                        \
        }                                                                                                             \
    }

#define KERNELS_OF(NAME, NAMED, T, KIND)                                                                              \
    extern "C" __global__ void __launch_bounds__(128) convolve_##NAME##_##NAMED(                                      \
        const T::Element* projected, const T::Element* recent, const T::Element* conv_weight, const float* conv_bias, \
        const float* decay_scale, const float* dt_bias, const int* run_of_token, RUNS, SIZES, int runs, int kernel,   \
        float update_scale, float* rows) {                                                                            \
        convolve<T, KIND>(projected, recent, conv_weight, conv_bias, decay_scale, dt_bias, GIVEN, run_of_token, runs, \
                          LAYOUT(KIND), kernel, history, update_scale, rows);                                         \
    }                                                                                                                 \
    extern "C" __global__ void __launch_bounds__(32 * SCAN_WARPS, KIND::KD > 128 ? 3 : 6) scan_##NAME##_##NAMED(      \
        const float* rows, const T::Element* projected, const float* skip, RUNS, SIZES, float* state,                 \
        T::Element* recent, float* mixtures) {                                                                        \
        scan<T, KIND>(rows, GIVEN, LAYOUT(KIND), history, projected, skip, state, recent, mixtures);                  \
    }                                                                                                                 \
    extern "C" __global__ void __launch_bounds__(512) finish_##NAME##_##NAMED(                                        \
        const float* mixtures, const T::Element* projected, const float* norm_weight, const int* run_of_token, SIZES, \
        int size, int weights, int norm, int gate_is_sigmoid, float epsilon, T::Element* out) {                       \
        finish<T, KIND>(mixtures, projected, norm_weight, run_of_token, LAYOUT(KIND), size, weights, norm,            \
                        gate_is_sigmoid, epsilon, out);                                                               \
    }
#define KERNELS_FOR(NAME, T, D)                                                                                       \
    KERNELS_OF(NAME, delta_##D, T, DeltaRule<D>)                                                  \
    KERNELS_OF(NAME, channels_##D, T, ChannelDecays<D>)                                                \
    KERNELS_OF(NAME, gated_##D, T, Gated<D>)
#define ALL_KERNELS(NAME, T)                                                                                          \
    FOR_KEY_DIMS(KERNELS_FOR, NAME, T)                                                                                \
    IF_HEAD_256(KERNELS_OF(NAME, gated_256, T, Gated<256>))

IF_BF16(ALL_KERNELS(bf16, Bf16))
IF_FP16(ALL_KERNELS(fp16, Fp16))
IF_FP32(ALL_KERNELS(fp32, Fp32))
