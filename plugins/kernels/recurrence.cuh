// A linear recurrence over the tokens of runs, one after another: for a head with the state S [KD, value_dim],
//
//     S = decay * S, then S = S + k (rate * (v - Sᵀ k))ᵀ, and out = Sᵀ q
//
// Every token goes through the same instructions in the same order, rounded in the same places, whether it is replayed,
// of a draft window or of a prompt, and the state is written as it is held. So a token has the same bits in any call.
#pragma once

#include "copy.cuh"
#include "elements.cuh"

// Runs of tokens. Run r of draft windows is slot r with `query` tokens; runs of prompts have `slots` and `starts`.
struct Runs {
    const i64* state_index;   // [runs]
    const i64* write_index;   // [runs]
    const i64* commit_index;  // [runs], or null: all tokens of a run but the last
    const i64* slots;         // [runs], or null
    const int* starts;        // [runs + 1], or null
    int query, replays;       // `replays`: the most tokens that a call replays
};

struct Run {
    i64 slot, covered, index, commit;
    int first, count;

    __device__ Run(const Runs& runs, int run) {
        slot = runs.slots ? runs.slots[run] : run;
        first = runs.starts ? runs.starts[run] : run * runs.query;
        count = runs.starts ? runs.starts[run + 1] - first : runs.query;
        index = runs.write_index[run];
        covered = max(min(runs.state_index[run], index), index - runs.replays);  // of a free slot both are any numbers
        commit = runs.commit_index ? runs.commit_index[run] : index + count - 1;
    }
};

constexpr int COLUMNS = 16;         // of a state's head, to a warp
constexpr int LANES = COLUMNS / 4;  // that hold the columns of a key, four each
constexpr int GROUPS = 32 / LANES;  // of a warp's lanes; group g has keys 4 (g + GROUPS i) to 4 (g + GROUPS i) + 3
constexpr int SCAN_WARPS = 2;
constexpr int SCAN_COLUMNS = SCAN_WARPS * COLUMNS;
constexpr int STAGED = 8;           // tokens in a stage of shared memory, of which there are two

__device__ inline float4 fused(float a, float4 x, float4 y) {
    return make_float4(fmaf(a, x.x, y.x), fmaf(a, x.y, y.y), fmaf(a, x.z, y.z), fmaf(a, x.w, y.w));
}
__device__ inline float4 product(float a, float4 x) {
    return make_float4(__fmul_rn(a, x.x), __fmul_rn(a, x.y), __fmul_rn(a, x.z), __fmul_rn(a, x.w));
}
__device__ inline float4 difference(float4 x, float4 y) {
    return make_float4(__fsub_rn(x.x, y.x), __fsub_rn(x.y, y.y), __fsub_rn(x.z, y.z), __fsub_rn(x.w, y.w));
}
__device__ inline float over_groups(float x) {
#pragma unroll
    for (int distance = LANES; distance < 32; distance *= 2)
        x = __fadd_rn(x, __shfl_xor_sync(0xffffffffu, x, distance));
    return x;
}
__device__ inline float4 over_groups(float4 x) {
    return make_float4(over_groups(x.x), over_groups(x.y), over_groups(x.z), over_groups(x.w));
}
__device__ inline float part_of(float4 x, int i) { return i == 0 ? x.x : i == 1 ? x.y : i == 2 ? x.z : x.w; }

// Where a token of the workspace has its parts: queries and keys by key head, values, decay and rate by value head.
struct Layout {
    int key_heads, value_heads, value_dim;

    __device__ int keys(int key_dim) const { return key_heads * key_dim; }
    __device__ int channels(int key_dim) const { return 2 * keys(key_dim) + value_heads * value_dim; }
    __device__ int width(int key_dim, int decays) const { return channels(key_dim) + value_heads * (decays + 1); }
    // Of a token's row in the workspace, so that rows are aligned to 16 bytes.
    __device__ int pitch(int key_dim, int decays) const { return (width(key_dim, decays) + 3) / 4 * 4; }
};

// What a block reads of a token.
template <int KD, bool PER_CHANNEL>
struct Token {
    float4 query[KD / 4], key[KD / 4], decay[PER_CHANNEL ? KD / 4 : 1], value[SCAN_COLUMNS / 4];
    float rate, unused[3];
};

__device__ inline void copy4(u32 to, const void* from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}

// Start the copies of a token for the columns of `head` from `column` on.
template <int KD, bool PER_CHANNEL>
__device__ void stage(Token<KD, PER_CHANNEL>& token, const float* row, Layout layout, int head, int column) {
    constexpr int DECAYS = PER_CHANNEL ? KD : 1;
    const float* query = row + head / (layout.value_heads / layout.key_heads) * KD;
    const float* decay = row + layout.channels(KD) + head * DECAYS;
    const float* value = row + 2 * layout.keys(KD) + head * layout.value_dim + column;
    for (int i = threadIdx.x; i < KD / 4; i += blockDim.x) {
        copy16(shared_address(&token.query[i]), query + 4 * i, true);
        copy16(shared_address(&token.key[i]), query + layout.keys(KD) + 4 * i, true);
        if constexpr (PER_CHANNEL) copy16(shared_address(&token.decay[i]), decay + 4 * i, true);
    }
    int columns = min(SCAN_COLUMNS, layout.value_dim - column) / 4, i = threadIdx.x;
    if (i < columns) copy16(shared_address(&token.value[i]), value + 4 * i, true);
    if (i == 32) copy4(shared_address(&token.rate), row + layout.channels(KD) + layout.value_heads * DECAYS + head);
    if (!PER_CHANNEL && i == 33) copy4(shared_address(&token.decay[0]), decay);
}

// The state of a warp's columns after a token; `column`: the first of this lane's, of those of the block.
template <int KD, bool PER_CHANNEL>
__device__ void advance(float4 (&state)[KD / GROUPS], const Token<KD, PER_CHANNEL>& token, int column) {
    int group = threadIdx.x % 32 / LANES;
    float4 seen = make_float4(0, 0, 0, 0), key[KD / GROUPS / 4];
#pragma unroll
    for (int i = 0; i < KD / GROUPS; ++i) {
        if (i % 4 == 0) key[i / 4] = token.key[group + GROUPS * (i / 4)];
        float decay = PER_CHANNEL ? part_of(token.decay[group + GROUPS * (i / 4)], i % 4) : token.decay[0].x;
        state[i] = product(decay, state[i]);
        seen = fused(part_of(key[i / 4], i % 4), state[i], seen);
    }
    float4 change = product(token.rate, difference(token.value[column / 4], over_groups(seen)));
#pragma unroll
    for (int i = 0; i < KD / GROUPS; ++i) state[i] = fused(part_of(key[i / 4], i % 4), change, state[i]);
}

template <int KD, bool PER_CHANNEL>
__device__ float4 output(const float4 (&state)[KD / GROUPS], const Token<KD, PER_CHANNEL>& token) {
    int group = threadIdx.x % 32 / LANES;
    float4 out = make_float4(0, 0, 0, 0);
#pragma unroll
    for (int i = 0; i < KD / GROUPS; ++i)
        out = fused(part_of(token.query[group + GROUPS * (i / 4)], i % 4), state[i], out);
    return over_groups(out);
}

// A block has SCAN_COLUMNS columns of one head: grid (value_heads * ceil(value_dim / SCAN_COLUMNS), runs). `rows` has
// the tokens of the workspace: `replays` places for those that a run replays, for all runs, then those of the call.
template <class T, int KD, bool PER_CHANNEL>
__device__ void scan(const float* rows, const Runs& runs, Layout layout, int history, const typename T::Element* mixed,
                     float* states, typename T::Element* recent, typename T::Element* out) {
    __shared__ __align__(16) Token<KD, PER_CHANNEL> stages[2][STAGED];
    Run run(runs, blockIdx.y);
    if (!run.count) return;
    int width = layout.width(KD, PER_CHANNEL ? KD : 1), lane = threadIdx.x % 32;
    int slices = (layout.value_dim + SCAN_COLUMNS - 1) / SCAN_COLUMNS, head = blockIdx.x / slices;
    int first = blockIdx.x % slices * SCAN_COLUMNS, own_column = threadIdx.x / 32 * COLUMNS + lane % LANES * 4;
    bool works = first + own_column < layout.value_dim;

    int pitch = layout.pitch(KD, PER_CHANNEL ? KD : 1), tokens = static_cast<int>(run.index + run.count - run.covered);
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

    i64 threads = static_cast<i64>(gridDim.x) * blockDim.x, thread = blockIdx.x * blockDim.x + threadIdx.x;
    for (int token = max(0, run.count - history); token < run.count; ++token) {
        auto* to = recent + (run.slot * history + (run.index + token) % history) * width;
        for (i64 i = thread; i < width; i += threads) to[i] = mixed[static_cast<i64>(run.first + token) * width + i];
    }

    float* held = states + (run.slot * layout.value_heads + head) * KD * layout.value_dim + first + own_column;
    auto place = [&](int i) { return static_cast<i64>(4 * (lane / LANES + GROUPS * (i / 4)) + i % 4) * layout.value_dim; };
    float4 state[KD / GROUPS];
#pragma unroll
    for (int i = 0; i < KD / GROUPS; ++i)
        state[i] = works && run.covered > 0 ? *reinterpret_cast<const float4*>(held + place(i))
                                            : make_float4(0, 0, 0, 0);  // at the beginning of a text
#pragma unroll 1
    for (int begin = 0; begin < tokens; begin += STAGED) {
        stage_tokens(begin + STAGED);
        wait_copies<1>();
        __syncthreads();
#pragma unroll 1
        for (int i = begin; i < min(begin + STAGED, tokens); ++i) {
            const Token<KD, PER_CHANNEL>& token = stages[begin / STAGED % 2][i % STAGED];
            advance<KD, PER_CHANNEL>(state, token, own_column);
            i64 position = run.covered + i;
            if (position >= run.index) {
                float4 mixture = output<KD, PER_CHANNEL>(state, token);
                i64 line = run.first + (position - run.index);
                auto* to = out + (line * layout.value_heads + head) * layout.value_dim + first + own_column;
                if (works && lane < LANES) {
                    T::store2(to, make_float2(mixture.x, mixture.y));
                    T::store2(to + 2, make_float2(mixture.z, mixture.w));
                }
            }
            if (works && position == run.commit - 1) {
#pragma unroll
                for (int j = 0; j < KD / GROUPS; ++j) *reinterpret_cast<float4*>(held + place(j)) = state[j];
            }
        }
        __syncthreads();  // the next copies overwrite this stage
    }
}
