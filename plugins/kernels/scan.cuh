// The recurrence over prompts and draft windows, whose queries, keys, values, decays and rates `convolve` has computed.
#pragma once

#include "copy.cuh"
#include "recurrence.cuh"

constexpr int STAGED = 8;  // tokens in a stage of shared memory, of which there are two

// What a scan reads and writes besides tokens: `rows` of the workspace has `replays` places for the tokens that a run
// replays, for all runs, then the tokens of the call.
struct Scanned {
    const float *rows, *skips;
    int runs, pitch;
    float *states, *mixtures;
};

// Some columns of a head of a run: what a block works on. Tokens are counted from the first one that is replayed.
template <class Kind, int WARPS>
struct Tile {
    static constexpr int WIDTH = WARPS * COLUMNS;
    int head, first, columns, replayed, tokens, last;  // `last`: the token after which the state is written back
    int slot, line, earlier, own;  // `line`: its first token among those of the call; the others: rows of its tokens
    bool begun;                    // whether there is a state

    __device__ Tile(const Scanned& scanned, const Runs& runs, const Layout<Kind>& layout, int tile) {
        int slices = (layout.value_dim + WIDTH - 1) / WIDTH, of_run = layout.value_heads * slices;
        int number = tile / of_run, part = tile % of_run;
        head = part / slices;
        first = part % slices * WIDTH;
        columns = min(WIDTH, layout.value_dim - first);
        Run run(runs, number);
        replayed = static_cast<int>(run.index - run.covered);
        tokens = run.count ? replayed + run.count : 0;
        last = static_cast<int>(run.commit - 1 - run.covered);
        begun = run.covered > 0;
        slot = static_cast<int>(run.slot);
        line = run.first;
        earlier = (number + 1) * runs.replays - replayed;
        own = scanned.runs * runs.replays + run.first;
    }
    __device__ const float* row(const Scanned& scanned, int token) const {
        return scanned.rows +
               static_cast<i64>(token < replayed ? earlier + token : own + token - replayed) * scanned.pitch;
    }
    __device__ float* state(const Scanned& scanned, const Layout<Kind>& layout) const {
        return scanned.states + (static_cast<i64>(slot) * layout.value_heads + head) * Kind::KD * layout.value_dim +
               first;
    }
    __device__ float* out(const Scanned& scanned, const Layout<Kind>& layout, int token) const {
        return scanned.mixtures + static_cast<i64>(line + token - replayed) * layout.values() +
               head * layout.value_dim + first;
    }
};

// Start the copies of the tokens of a tile from `begin` on, each by one warp.
template <class Kind, int WARPS>
__device__ void stage(Token<Kind, WARPS>* to, const Tile<Kind, WARPS>& tile, const Scanned& scanned,
                      const Layout<Kind>& layout, int begin) {
    int key_head = tile.head / layout.shared(), lane = threadIdx.x % 32, end = min(begin + STAGED, tile.tokens);
#pragma unroll 1
    for (int i = begin + threadIdx.x / 32; i < end; i += WARPS) {
        const float* row = tile.row(scanned, i);
        const float* decay = row + layout.decay() + tile.head * Kind::DECAYS;
        const float* value = row + layout.value() + tile.head * layout.value_dim + tile.first;
        auto& token = to[i - begin];
#pragma unroll
        for (int j = lane; j < Kind::KD / 4; j += 32) {
            copy16(shared_address(&token.query[j]), row + layout.query() + key_head * Kind::KD + 4 * j, true);
            copy16(shared_address(&token.key[j]), row + layout.key() + key_head * Kind::KD + 4 * j, true);
            if constexpr (Kind::PER_CHANNEL) copy16(shared_address(&token.decay[j]), decay + 4 * j, true);
        }
        if (lane < tile.columns / 4) copy16(shared_address(&token.value[2 * lane]), value + 4 * lane, true);
        if (lane == 16) copy4(shared_address(&token.rate), row + layout.rate() + tile.head);
        if (lane == 17) copy4(shared_address(&token.key_query), row + layout.key_query() + key_head);
        if (!Kind::PER_CHANNEL && lane == 18) copy4(shared_address(&token.decay[0]), decay);
    }
}

// Advance the state by the staged tokens of a tile from `begin` on.
template <class Kind, int WARPS>
__device__ void advance(State<Kind>& state, const Token<Kind, WARPS>* tokens, const Tile<Kind, WARPS>& tile, int begin,
                        const Scanned& scanned, const Layout<Kind>& layout, float skip) {
    int end = min(begin + STAGED, tile.tokens);
    bool exists = state.column < tile.columns, writes = exists && threadIdx.x % 32 < LANES;
    float* out = tile.out(scanned, layout, begin) + state.column;
#pragma unroll 1
    for (int i = begin; i < end; ++i, out += layout.values()) {
        float2 mixture = state.advance(tokens[i - begin], skip, i < tile.replayed);
        if (i >= tile.replayed && writes) *reinterpret_cast<float2*>(out) = mixture;
        if (i == tile.last && exists) state.store(tile.state(scanned, layout), layout.value_dim);
    }
}

// A tile for each block: grid (tiles of a run * runs).
template <class Kind, int WARPS>
__device__ void scan(const Scanned& scanned, const Runs& runs, const Layout<Kind>& layout) {
    __shared__ __align__(16) Token<Kind, WARPS> stages[2][STAGED];
    begin_next();
    Tile<Kind, WARPS> tile(scanned, runs, layout, blockIdx.x);
    if (!tile.tokens) return;
    // The previous kernel writes rows alone, so the state may be read before it has ended.
    State<Kind> state;
    state.load(tile.state(scanned, layout), layout.value_dim, tile.begun && state.column < tile.columns);
    float skip = scanned.skips[tile.head];
    wait_for_previous();
    stage(stages[0], tile, scanned, layout, 0);
    close_copies();
#pragma unroll 1
    for (int begin = 0, buffer = 0; begin < tile.tokens; begin += STAGED, buffer ^= 1) {
        stage(stages[buffer ^ 1], tile, scanned, layout, begin + STAGED);
        close_copies();
        wait_copies<1>();
        __syncthreads();
        advance(state, stages[buffer], tile, begin, scanned, layout, skip);
        __syncthreads();  // the next copies overwrite this stage
    }
}
