// A linear recurrence over the tokens of runs, one after another: for a head with the state S [KD, value_dim],
//
//     S = decay * S, c = rate * (v - Sᵀ k) by the delta rule, else rate * v; out = Sᵀ q + (k · q) c + skip * v, S = S + k cᵀ
//
// Every token goes through the same instructions in the same order, rounded in the same places, whether it is replayed,
// of a draft window or of a prompt, and the state is written as it is held. So a token has the same bits in any call.
#pragma once

#include "copy.cuh"
#include "early.cuh"
#include "layout.cuh"
#include "runs.cuh"

constexpr int COLUMNS = 8;          // of a state's head, to a warp
constexpr int LANES = COLUMNS / 2;  // that hold the columns of a key, two each
constexpr int GROUPS = 32 / LANES;  // of a warp's lanes; group g has keys 4 (g + GROUPS i) to 4 (g + GROUPS i) + 3
constexpr int SCAN_WARPS = 4;
constexpr int SCAN_COLUMNS = SCAN_WARPS * COLUMNS;
constexpr int STAGED = 8;           // tokens in a stage of shared memory, of which there are two

__device__ inline float2 fused(float a, float2 x, float2 y) { return make_float2(fmaf(a, x.x, y.x), fmaf(a, x.y, y.y)); }
__device__ inline float2 product(float a, float2 x) { return make_float2(__fmul_rn(a, x.x), __fmul_rn(a, x.y)); }
__device__ inline float2 difference(float2 x, float2 y) {
    return make_float2(__fsub_rn(x.x, y.x), __fsub_rn(x.y, y.y));
}
__device__ inline float over_groups(float x) {
#pragma unroll
    for (int distance = LANES; distance < 32; distance *= 2)
        x = __fadd_rn(x, __shfl_xor_sync(0xffffffffu, x, distance));
    return x;
}
__device__ inline float2 over_groups(float2 x) { return make_float2(over_groups(x.x), over_groups(x.y)); }
__device__ inline float part_of(float4 x, int i) { return i == 0 ? x.x : i == 1 ? x.y : i == 2 ? x.z : x.w; }

// What a block reads of a token.
template <class Kind>
struct Token {
    float4 query[Kind::KD / 4], key[Kind::KD / 4], decay[Kind::PER_CHANNEL ? Kind::KD / 4 : 1];
    float2 value[SCAN_COLUMNS / 2];
    float rate, key_query, unused[2];
};

__device__ inline void copy4(u32 to, const void* from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}

// Start the copies of a token for the columns of `head` from `column` on.
template <class Kind>
__device__ void stage(Token<Kind>& token, const float* row, const Layout<Kind>& layout, int head, int column) {
    int key_head = head / layout.shared(), i = threadIdx.x;
    const float* decay = row + layout.decay() + head * Kind::DECAYS;
    if (i < Kind::KD / 4) {
        copy16(shared_address(&token.query[i]), row + layout.query() + key_head * Kind::KD + 4 * i, true);
        copy16(shared_address(&token.key[i]), row + layout.key() + key_head * Kind::KD + 4 * i, true);
        if constexpr (Kind::PER_CHANNEL) copy16(shared_address(&token.decay[i]), decay + 4 * i, true);
    }
    i -= 64;  // the other warps
    int columns = min(SCAN_COLUMNS, layout.value_dim - column) / 4;
    if (i >= 0 && i < columns)
        copy16(shared_address(&token.value[2 * i]), row + layout.value() + head * layout.value_dim + column + 4 * i, true);
    if (i == 32) copy4(shared_address(&token.rate), row + layout.rate() + head);
    if (i == 33) copy4(shared_address(&token.key_query), row + layout.key_query() + key_head);
    if (!Kind::PER_CHANNEL && i == 34) copy4(shared_address(&token.decay[0]), decay);
}

// Advance the state of a warp's columns by a token; return its outputs if it is not replayed. `column`: the first of this
// lane's, of those of the block.
template <class Kind>
__device__ float2 advance(float2 (&state)[Kind::KD / GROUPS], const Token<Kind>& token, int column, float skip,
                          bool replayed) {
    constexpr int KEYS = Kind::KD / GROUPS;  // of a lane
    int group = threadIdx.x % 32 / LANES;
    float2 seen = make_float2(0, 0), out = make_float2(0, 0), value = token.value[column / 2];
    float4 key[KEYS / 4];
#pragma unroll
    for (int i = 0; i < KEYS; ++i) {
        if (i % 4 == 0) key[i / 4] = token.key[group + GROUPS * (i / 4)];
        float decay = Kind::PER_CHANNEL ? part_of(token.decay[group + GROUPS * (i / 4)], i % 4) : token.decay[0].x;
        state[i] = product(decay, state[i]);
        if (Kind::DELTA) seen = fused(part_of(key[i / 4], i % 4), state[i], seen);
    }
    if (!replayed) {
#pragma unroll
        for (int i = 0; i < KEYS; ++i)
            out = fused(part_of(token.query[group + GROUPS * (i / 4)], i % 4), state[i], out);
        out = over_groups(out);
    }
    float2 change = product(token.rate, Kind::DELTA ? difference(value, over_groups(seen)) : value);
#pragma unroll
    for (int i = 0; i < KEYS; ++i) state[i] = fused(part_of(key[i / 4], i % 4), change, state[i]);
    return fused(skip, value, fused(token.key_query, change, out));
}

// A block has SCAN_COLUMNS columns of one head: grid (value_heads * ceil(value_dim / SCAN_COLUMNS), runs). `rows` has
// the tokens of the workspace: `replays` places for those that a run replays, for all runs, then those of the call.
template <class T, class Kind>
__device__ void scan(const float* rows, const Runs& runs, const Layout<Kind>& layout, int history,
                     const typename T::Element* given, const float* skips, float* states,
                     typename T::Element* recent, float* mixtures) {
    constexpr int KEYS = Kind::KD / GROUPS;
    __shared__ __align__(16) Token<Kind> stages[2][STAGED];
    begin_next();
    Run run(runs, blockIdx.y);
    if (!run.count) return;
    int lane = threadIdx.x % 32, slices = (layout.value_dim + SCAN_COLUMNS - 1) / SCAN_COLUMNS;
    int head = blockIdx.x / slices, first = blockIdx.x % slices * SCAN_COLUMNS;
    int own_column = threadIdx.x / 32 * COLUMNS + lane % LANES * 2;
    bool works = first + own_column < layout.value_dim;

    // The previous kernel writes `rows` alone, so the state may be read before it has ended.
    float* held = states + (run.slot * layout.value_heads + head) * Kind::KD * layout.value_dim + first + own_column;
    auto place = [&](int i) { return static_cast<i64>(4 * (lane / LANES + GROUPS * (i / 4)) + i % 4) * layout.value_dim; };
    float2 state[KEYS];
#pragma unroll
    for (int i = 0; i < KEYS; ++i)
        state[i] = works && run.covered > 0 ? *reinterpret_cast<const float2*>(held + place(i))
                                            : make_float2(0, 0);  // at the beginning of a text
    float skip = skips[head];
    wait_for_previous();

    int pitch = layout.pitch(), tokens = static_cast<int>(run.index + run.count - run.covered);
    const float* replayed = rows + static_cast<i64>(blockIdx.y) * runs.replays * pitch;
    const float* own = rows + (static_cast<i64>(gridDim.y) * runs.replays + run.first) * pitch;
    auto stage_tokens = [&](int begin) {
        for (int i = begin; i < min(begin + STAGED, tokens); ++i) {
            i64 ahead = run.covered + i - run.index;
            const float* row = ahead < 0 ? replayed + (ahead + runs.replays) * pitch : own + ahead * pitch;
            stage(stages[begin / STAGED % 2][i % STAGED], row, layout, head, first);
        }
        close_copies();
    };
    stage_tokens(0);

    int threads = gridDim.x * blockDim.x, thread = blockIdx.x * blockDim.x + threadIdx.x;
    for (int token = max(0, run.count - history); token < run.count; ++token) {
        auto* to = recent + (run.slot * history + (run.index + token) % history) * layout.width();
        const auto* from = given + static_cast<i64>(run.first + token) * layout.given_pitch;
        for (int i = thread; i < layout.width(); i += threads) to[i] = from[layout.given_column(i)];
    }
#pragma unroll 1
    for (int begin = 0; begin < tokens; begin += STAGED) {
        stage_tokens(begin + STAGED);
        wait_copies<1>();
        __syncthreads();
#pragma unroll 1
        for (int i = begin; i < min(begin + STAGED, tokens); ++i) {
            i64 position = run.covered + i;
            float2 mixture = advance<Kind>(state, stages[begin / STAGED % 2][i % STAGED], own_column, skip,
                                           position < run.index);
            if (position >= run.index && works && lane < LANES) {
                i64 line = run.first + (position - run.index);
                *reinterpret_cast<float2*>(mixtures + (line * layout.value_heads + head) * layout.value_dim + first +
                                           own_column) = mixture;
            }
            if (works && position == run.commit - 1) {
#pragma unroll
                for (int j = 0; j < KEYS; ++j) *reinterpret_cast<float2*>(held + place(j)) = state[j];
            }
        }
        __syncthreads();  // the next copies overwrite this stage
    }
}
