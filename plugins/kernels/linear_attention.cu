// linear_attention in three or four kernels. `convolve` computes queries, keys, values, decays and rates of every
// token, replayed ones included, in parallel; `scan` goes through the tokens of a run; `finish` gates and norms
// outputs, and keeps the newest tokens in the ring, which no kernel before it writes. Prompts of some kinds are
// processed 64 tokens at a time by `convolve_chunks`, `prepare_chunks`, `scan_chunks` and `finish_heads`.
//
// convolve_<dtype>_<kind>: 128 threads, grid (replays * runs + tokens, ceil(jobs / 4)); see convolve
// scan_<dtype>_<kind> for prompts, scan_windows_<dtype>_<kind> for draft windows: scan.cuh
// convolve_chunks_<dtype>_delta_128, prepare_chunks_…, scan_chunks_… and finish_heads_… for prompts in the 16-bit
// types:
//   chunk_convolution.cuh, chunks.cuh, chunk_finish.cuh
// finish_<dtype>_<kind>: see finish
// <kind>: delta_<D>, channels_<D> (one decay per key channel) or gated_<D> (no delta rule); D is the size of a key, 256
//   without the delta rule alone.

#include "chunk_convolution.cuh"
#include "chunk_finish.cuh"
#include "chunks.cuh"
#include "convolution.cuh"
#include "reduce.cuh"
#include "scan.cuh"
#include "variants.cuh"

// A warp has one job of a token: query and key of a head, 64 values, or 32 of the decays and rates.
template <class T, class Kind>
__device__ void convolve(const typename T::Element* given, const typename T::Element* recent, const Weights<T>& weights,
                         const Runs& runs, const int* run_of_token, int count, const Layout<Kind>& layout, int history,
                         float* rows) {
    __shared__ Tap<T> taps[MAX_KERNEL];
    wait_for_previous();
    begin_next();  // now all kernels before the previous one are complete, so the next two may read what they wrote
    int replays = runs.replays * count, entry = blockIdx.x, token = entry - replays;
    int number = token < 0 ? entry / runs.replays : run_of(runs, run_of_token, token);
    if (number < 0) return;  // padding
    Run run(runs, number);
    i64 position = token < 0 ? run.index - runs.replays + entry % runs.replays : run.index + token - run.first;
    if (!run.count || position < run.covered) return;
    int before = weights.kernel - 1;
    if (threadIdx.x <= before)
        taps[threadIdx.x] =
            tap_at<T>(position - before + threadIdx.x, run, given, layout.given_pitch, recent, layout.width(), history);
    __syncthreads();

    int lane = threadIdx.x % 32, job = blockIdx.y * 4 + threadIdx.x / 32;
    float* to = rows + static_cast<i64>(entry) * layout.pitch();
    Projected<T, Kind> projected{taps, weights, layout};
    if (job < layout.key_heads) {
        int at = job * Kind::KD;
        projected.keys(job, token < 0, to + layout.query() + at, to + layout.key() + at, to + layout.key_query() + job);
        return;
    }
    job -= layout.key_heads;
    int of_values = (layout.values() + 63) / 64;
    if (job < of_values) {
        int at = 64 * job + 2 * lane;
        if (at < layout.values()) *reinterpret_cast<float2*>(to + layout.value() + at) = projected.values(at);
        return;
    }
    int at = 32 * (job - of_values) + lane, decays = layout.value_heads * Kind::DECAYS;
    if (at < decays) {
        float step = projected.step(at);
        to[layout.decay() + at] = projected.decay(at, step);
        if (!Kind::DELTA) to[layout.rate() + at] = step;
    } else if (Kind::DELTA && (at -= decays) < layout.value_heads) {
        to[layout.rate() + at] = projected.rate(at);
    }
}

constexpr int KEPT = 4;  // pairs or single values of a token that a thread stores in the ring

// Store a part of a token of the call in the ring, which `convolve` may read until the wait.
template <class T, class Kind>
__device__ void keep(const typename T::Element* row, const Layout<Kind>& layout, int part, typename T::Element* to) {
    struct alignas(2 * sizeof(typename T::Element)) Pair { typename T::Element first, second; } held[KEPT];
    int pairs = layout.channels() / 2, units = layout.width() - pairs;
    auto unit = [&](int j) { return static_cast<int>((part * KEPT + j) * blockDim.x + threadIdx.x); };
#pragma unroll
    for (int j = 0; j < KEPT; ++j) {
        int i = unit(j);
        if (i < pairs) {
            held[j] = *reinterpret_cast<const Pair*>(row + layout.given_column(2 * i));
        } else if (i < units) {
            held[j].first = row[layout.given_column(pairs + i)];
        }
    }
    wait_for_previous();
#pragma unroll
    for (int j = 0; j < KEPT; ++j) {
        int i = unit(j);
        if (i < pairs) {
            *reinterpret_cast<Pair*>(to + 2 * i) = held[j];
        } else if (i < units) {
            to[pairs + i] = held[j].first;
        }
    }
}

enum { NO_NORM, NORM_BEFORE_GATE, NORM_AFTER_GATE };
constexpr int OF_A_WARP = 256;  // the most outputs of a group that one warp norms
constexpr int HELD = 4;         // pairs of a group that a thread has in registers; it reads further ones again

// Gate and norm the outputs of a token, in groups; the norm's weight is repeated over them. Grid (tokens, blocks): a
// group of at most OF_A_WARP outputs has a warp of 128 threads, a larger one a block of a power of two of at most 512.
// The blocks after those of the groups keep the token.
template <class T, class Kind>
__device__ void finish(const float* mixtures, const typename T::Element* given, const float* weight,
                       const int* run_of_token, const Runs& runs, const Layout<Kind>& layout, int history, int size,
                       int weights, int norm, int gate_is_sigmoid, float epsilon, typename T::Element* recent,
                       typename T::Element* out) {
    begin_next();
    // Until the wait a block reads what kernels before `convolve` wrote: they were complete when `scan` began.
    int token = blockIdx.x, number = run_of(runs, run_of_token, token);
    if (number < 0) return;  // padding
    const auto* row = given + static_cast<i64>(token) * layout.given_pitch;
    bool by_warp = size <= OF_A_WARP;
    int threads = by_warp ? 32 : blockDim.x, thread = threadIdx.x % threads, of_block = blockDim.x / threads;
    int part = static_cast<int>(blockIdx.y) - (layout.values() / size + of_block - 1) / of_block;
    if (part >= 0) {
        Run run(runs, number);
        if (token - run.first < run.count - history) return;
        i64 position = run.index + token - run.first;
        keep<T>(row, layout, part, recent + (run.slot * history + position % history) * layout.width());
        return;
    }

    int first = (blockIdx.y * of_block + threadIdx.x / threads) * size, end = min(first + size, layout.values());
    auto at = [&](int j) { return first + 2 * (thread + j * threads); };
    auto gate = [&](int i) {
        float2 x = T::load2(row + layout.given_at(GATE, layout.shared() * layout.value_dim, i));
        return gate_is_sigmoid ? make_float2(sigmoid(x.x), sigmoid(x.y)) : silu(x);
    };
    auto factor = [&](int i) {
        return norm == NO_NORM ? make_float2(1, 1) : make_float2(weight[i % weights], weight[(i + 1) % weights]);
    };
    float2 gates[HELD], factors[HELD], held[HELD];
#pragma unroll
    for (int j = 0; j < HELD; ++j) {
        if (at(j) >= end) continue;
        gates[j] = gate(at(j));
        factors[j] = factor(at(j));
    }
    wait_for_previous();
    const float* from = mixtures + static_cast<i64>(token) * layout.values();
    auto value = [&](int i, float2 by) {
        float2 x = *reinterpret_cast<const float2*>(from + i);
        return norm == NORM_BEFORE_GATE ? x : make_float2(__fmul_rn(x.x, by.x), __fmul_rn(x.y, by.y));
    };
#pragma unroll
    for (int j = 0; j < HELD; ++j)
        if (at(j) < end) held[j] = value(at(j), gates[j]);
    float scale = 1;
    if (norm != NO_NORM) {
        float squares = 0;
        auto add = [&](float2 x) { squares = fmaf(x.x, x.x, fmaf(x.y, x.y, squares)); };
#pragma unroll
        for (int j = 0; j < HELD; ++j)
            if (at(j) < end) add(held[j]);
        for (int i = at(HELD); i < end; i += 2 * threads) add(value(i, gate(i)));
        squares = by_warp ? sum_of_warp(squares) : block_sum(squares);
        scale = rsqrtf(__fdiv_rn(squares, static_cast<float>(size)) + epsilon);
    }
    auto store = [&](int i, float2 x, float2 by, float2 times) {
        if (norm != NO_NORM) x = make_float2(x.x * scale * times.x, x.y * scale * times.y);
        if (norm == NORM_BEFORE_GATE) x = make_float2(x.x * by.x, x.y * by.y);
        T::store2(out + static_cast<i64>(token) * layout.values() + i, x);
    };
#pragma unroll
    for (int j = 0; j < HELD; ++j)
        if (at(j) < end) store(at(j), held[j], gates[j], factors[j]);
    for (int i = at(HELD); i < end; i += 2 * threads) store(i, value(i, gate(i)), gate(i), factor(i));
}

#define RUNS                                                                                                      \
    const i64 *state_index, const i64 *write_index, const i64 *commit_index, const i64 *slots, const int *starts, \
        int query, int replays, int history
#define SIZES                                                                                               \
    int key_heads, int value_heads, int value_dim, int given_pitch, int query_at, int key_at, int value_at, \
        int decay_at, int update_at, int gate_at, int query_stride, int key_stride, int value_stride,       \
        int decay_stride, int update_stride, int gate_stride
#define WEIGHTS(T)                                                                                                     \
    const T::Element *conv_weight, const float *conv_bias, const float *decay_scale, const float *dt_bias, int kernel, \
        float update_scale
#define GIVEN (Runs{state_index, write_index, commit_index, slots, starts, query, replays})
#define OF_LAYER(T) (Weights<T>{conv_weight, conv_bias, decay_scale, dt_bias, kernel, update_scale})
#define LAYOUT(KIND)                           \
    (Layout<KIND>{key_heads,                   \
                  value_heads,                 \
                  value_dim,                   \
                  given_pitch,                 \
                  {{query_at, query_stride},   \
                   {key_at, key_stride},       \
                   {value_at, value_stride},   \
                   {decay_at, decay_stride},   \
                   {update_at, update_stride}, \
                   {gate_at, gate_stride}}})
#define SCAN_WARPS(KIND) (KIND::KD > 128 ? 4 : 8)  // of a prompt: it has few blocks, with many registers
#define WINDOW_WARPS 4
#define SCANNED(KIND) (Scanned{rows, skip, runs, LAYOUT(KIND).pitch(), state, mixtures})

#define KERNELS_OF(NAME, NAMED, T, KIND)                                                                               \
    extern "C" __global__ void __launch_bounds__(128)                                                                  \
        convolve_##NAME##_##NAMED(const T::Element* projected, const T::Element* recent, const int* run_of_token,      \
                                  WEIGHTS(T), RUNS, SIZES, int runs, float* rows) {                                    \
        convolve<T, KIND>(projected, recent, OF_LAYER(T), GIVEN, run_of_token, runs, LAYOUT(KIND), history, rows);     \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(32 * SCAN_WARPS(KIND), KIND::KD > 128 ? 3 : 2) scan_##NAME##_##NAMED( \
        const float* rows, const float* skip, RUNS, SIZES, int runs, float* state, float* mixtures) {                  \
        scan<KIND, SCAN_WARPS(KIND)>(SCANNED(KIND), GIVEN, LAYOUT(KIND));                                              \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(32 * WINDOW_WARPS, KIND::KD > 128 ? 3 : 5)                            \
        scan_windows_##NAME##_##NAMED(const float* rows, const float* skip, RUNS, SIZES, int runs, float* state,       \
                                      float* mixtures) {                                                               \
        scan<KIND, WINDOW_WARPS>(SCANNED(KIND), GIVEN, LAYOUT(KIND));                                                  \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(512)                                                                  \
        finish_##NAME##_##NAMED(const float* mixtures, const T::Element* projected, const float* norm_weight,          \
                                const int* run_of_token, RUNS, SIZES, int size, int weights, int norm,                 \
                                int gate_is_sigmoid, float epsilon, T::Element* recent, T::Element* out) {             \
        finish<T, KIND>(mixtures, projected, norm_weight, run_of_token, GIVEN, LAYOUT(KIND), history, size, weights,   \
                        norm, gate_is_sigmoid, epsilon, recent, out);                                                  \
    }
#define KERNELS_FOR(NAME, T, D)                         \
    KERNELS_OF(NAME, delta_##D, T, DeltaRule<D>)        \
    KERNELS_OF(NAME, channels_##D, T, ChannelDecays<D>) \
    KERNELS_OF(NAME, gated_##D, T, Gated<D>)
#define ALL_KERNELS(NAME, T)           \
    FOR_KEY_DIMS(KERNELS_FOR, NAME, T) \
    IF_HEAD_256(KERNELS_OF(NAME, gated_256, T, Gated<256>))

#define CHUNK_KERNELS(NAME, NAMED, T, KIND)                                                                          \
    extern "C" __global__ void __launch_bounds__(128, 8) convolve_chunks_##NAME##_##NAMED(                           \
        const T::Element* projected, const T::Element* recent, const int* run_of_token, WEIGHTS(T), RUNS, SIZES,     \
        int runs, int tokens, u8* rows) {                                                                            \
        convolve_chunks<T, KIND>(projected, recent, OF_LAYER(T), GIVEN, run_of_token, runs, tokens, LAYOUT(KIND),    \
                                 history, rows);                                                                     \
    }                                                                                                                \
    extern "C" __global__ void __launch_bounds__(64 * ACROSS, 2)                                                     \
        prepare_chunks_##NAME##_##NAMED(const u8* rows, RUNS, SIZES, int runs, Prepared* prepared) {                 \
        extern __shared__ uint4 shared[];                                                                            \
        auto& memory = *reinterpret_cast<Preparing*>(shared);                                                        \
        prepare_chunks<KIND>(memory, rows, GIVEN, runs, LAYOUT(KIND), prepared);                                     \
    }                                                                                                                \
    extern "C" __global__ void __launch_bounds__(32 * ACROSS * CHUNK_DOWN, CHUNK_BLOCKS)                             \
        scan_chunks_##NAME##_##NAMED(const u8* rows, const float* skip, RUNS, SIZES, int runs,                       \
                                     const Prepared* prepared, float* state, float* mixtures) {                      \
        extern __shared__ uint4 shared[];                                                                            \
        auto& memory = *reinterpret_cast<Scanning<CHUNK_DOWN>*>(shared);                                             \
        scan_chunks<T, KIND, CHUNK_DOWN>(memory, rows, skip, GIVEN, runs, LAYOUT(KIND), prepared, state, mixtures);  \
    }                                                                                                                \
    extern "C" __global__ void __launch_bounds__(32 * FINISHED_HEADS) finish_heads_##NAME##_##NAMED(                 \
        const float* mixtures, const T::Element* projected, const float* norm_weight, const int* run_of_token, RUNS, \
        SIZES, int tokens, int gate_is_sigmoid, float epsilon, T::Element* recent, T::Element* out) {                \
        finish_heads<T, KIND>(mixtures, projected, norm_weight, run_of_token, GIVEN, tokens, LAYOUT(KIND), history,  \
                              gate_is_sigmoid, epsilon, recent, out);                                                \
    }
#define CHUNK_DOWN 1
#define CHUNK_BLOCKS 2

IF_BF16(IF_HEAD_128(CHUNK_KERNELS(bf16, delta_128, Bf16, DeltaRule<128>)))
IF_FP16(IF_HEAD_128(CHUNK_KERNELS(fp16, delta_128, Fp16, DeltaRule<128>)))
IF_BF16(ALL_KERNELS(bf16, Bf16))
IF_FP16(ALL_KERNELS(fp16, Fp16))
IF_FP32(ALL_KERNELS(fp32, Fp32))
