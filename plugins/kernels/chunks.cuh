// The delta rule for prompts, 64 tokens at a time by tensor cores. For a head whose state is S before a chunk, with the
// product g_i of the decays up to token i of the chunk:
//
//     L_ij = rate_i g_i / g_j (k_i · k_j) for j < i, T = (I + L)⁻¹, M_ij = g_i / g_j (q_i · k_j) for j <= i
//     C = T R with R_i = rate_i (v_i - g_i Sᵀ k_i)
//     out_i = g_i Sᵀ q_i + Σ_j M_ij c_j, S = g_n S + Σ_j g_n / g_j k_j c_jᵀ
//
// (Yang et al., Gated Delta Networks, 2024, section 3.3). Chunks end before positions that are 63 modulo 64. A run that
// ends with a block of the cache leaves its last token to be replayed, so the next run begins with a chunk. Row i of
// every product needs the tokens up to i alone, so the bits of a token do not depend on how its prompt is cut at block
// ends.
#pragma once

#include "copy.cuh"
#include "early.cuh"
#include "layout.cuh"
#include "runs.cuh"
#include "tf32.cuh"

constexpr int CHUNK = 64, CHUNK_KEY = 128;  // tokens of a chunk, values of a key
constexpr int ACROSS = 4;                   // warps, each with 16 tokens, and with 32 keys of the state
constexpr int TILES = 4;                    // of 8 columns, to a warp

// What prepare_chunks computes for a value head of a chunk.
struct Prepared {
    float inverse[CHUNK][CHUNK], mixing[CHUNK][CHUNK];  // T and M, in the blocks of 16 x 16 at and below the diagonal
    float decayed[CHUNK], rate[CHUNK], kept[CHUNK], all[CHUNK];  // g_i; g_n / g_i, 0 if i is not final; all[0]: g_n
};
static_assert(sizeof(Prepared) == 4 * (2 * 64 * 64 + 4 * 64), "_PREPARED of linear_attention.py");

// The chunks of a run. Chunk numbers are shared by the runs of a call; some remain unused.
struct RunChunks {
    int first, count;
    i64 block;  // the first chunk ends before 64 block + 63

    __device__ RunChunks(const Run& run, int number) : first(run.first / CHUNK + 3 * number), count(0) {
        block = (run.covered + 1) / CHUNK;
        if (run.count) count = static_cast<int>((run.index + run.count) / CHUNK - block) + 1;
    }
};

// Rows of the workspace with the tokens of a chunk.
struct ChunkRows {
    const float* rows;
    int pitch, tokens, replayed, final;  // `final` tokens change the state; the first `replayed` have no output
    i64 earlier, own;                    // rows of the first token, if it is replayed and if not

    __device__ ChunkRows(const float* from, int width, const Runs& runs, const Run& run, int count, int number,
                         i64 block)
        : rows(from), pitch(width) {
        i64 begin = max(run.covered, block * CHUNK - 1), end = run.index + run.count;
        tokens = static_cast<int>(min(end, block * CHUNK + CHUNK - 1) - begin);
        final = static_cast<int>(min(end - 1 - begin, static_cast<i64>(tokens)));
        replayed = static_cast<int>(max(run.index - begin, i64(0)));
        earlier = static_cast<i64>(number + 1) * runs.replays - (run.index - begin);
        own = static_cast<i64>(count) * runs.replays + run.first + begin - run.index;
    }
    __device__ const float* row(int token) const {
        return rows + (token < replayed ? earlier + token : own + token) * pitch;
    }
    __device__ float2 two_of(int token, int at) const {
        return token < tokens ? *reinterpret_cast<const float2*>(row(token) + at) : make_float2(0, 0);
    }
};

// Keys or queries of a chunk in shared memory, in units of four values, so placed that lanes that read a unit of two
// tokens each, or units of four tokens each, do not meet in a bank.
struct ChunkVectors {
    float4 units[CHUNK][CHUNK_KEY / 4];  // a warp copies a token

    __device__ static int place(int unit, int token) {
        return unit ^ (((token ^ token >> 3) & 1) << 2 | (token >> 2 & 1) << 1);
    }
    __device__ float4 four(int token, int unit) const { return units[token][place(unit, token)]; }
    __device__ uint4 operand(int token, int unit) const { return to_tf32(four(token, unit)); }

    // Start copies of the values from `at` on; zeros of tokens before `begin` and of those that are not there.
    __device__ void copy(const ChunkRows& tokens, int at, int begin = 0) {
        int unit = threadIdx.x % 32;
#pragma unroll 1
        for (int token = threadIdx.x / 32; token < CHUNK; token += blockDim.x / 32) {
            bool there = begin <= token && token < tokens.tokens;
            const float* from = there ? tokens.row(token) + at + 4 * unit : tokens.rows;
            copy16(shared_address(&units[token][place(unit, token)]), from, there);
        }
    }
};

constexpr int PREPARED_HEADS = 2;  // at once
using Lower = float[CHUNK][CHUNK + 4];

// Shared memory of prepare_chunks.
struct Preparing {
    union {
        struct { ChunkVectors keys, queries; };
        struct {
            Lower lower[PREPARED_HEADS];  // the transposed L
            float4 inverse[PREPARED_HEADS][CHUNK][CHUNK / 4];
        };
    };
    float logs[PREPARED_HEADS][CHUNK], sums[PREPARED_HEADS][CHUNK], rates[PREPARED_HEADS][CHUNK];
    int number;
};
static_assert(sizeof(Preparing) == 69136, "_PREPARE_BYTES of linear_attention.py");

// Columns `first` to `first` + 15 of T = (I + L)⁻¹, by one warp: a row is complete when the ones before it have been
// taken from it. Lanes have rows `lane` and 32 + `lane`.
__device__ inline void invert(const Lower& lower, float4 (&inverse)[CHUNK][CHUNK / 4], int first) {
    constexpr int COLUMNS_OF_WARP = 16;
    int lane = threadIdx.x % 32;
    float x[2][COLUMNS_OF_WARP];
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int i = 0; i < COLUMNS_OF_WARP; ++i) x[half][i] = 32 * half + lane == first + i;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll 1
        for (int row = max(first, 32 * half); row < 32 * half + 32; ++row) {
            float4* complete = &inverse[row][first / 4];
            if (32 * half + lane == row) {
#pragma unroll
                for (int i = 0; i < COLUMNS_OF_WARP; i += 4)
                    complete[i / 4] = make_float4(x[half][i], x[half][i + 1], x[half][i + 2], x[half][i + 3]);
            }
            __syncwarp();
            float by[2] = {-lower[row][lane], -lower[row][32 + lane]};  // 0 of the rows up to this one
#pragma unroll
            for (int i = 0; i < COLUMNS_OF_WARP; i += 4) {
                float4 y = complete[i / 4];
#pragma unroll
                for (int other = half; other < 2; ++other) {
                    x[other][i] = fmaf(by[other], y.x, x[other][i]);
                    x[other][i + 1] = fmaf(by[other], y.y, x[other][i + 1]);
                    x[other][i + 2] = fmaf(by[other], y.z, x[other][i + 2]);
                    x[other][i + 3] = fmaf(by[other], y.w, x[other][i + 3]);
                }
            }
        }
    }
}

// Everything of a chunk that does not depend on the state, for the value heads of a key head. Grid (chunks, key heads),
// 128 threads.
template <class Kind>
__device__ void prepare_chunks(Preparing& memory, const float* rows, const Runs& runs, int count,
                               const Layout<Kind>& layout, Prepared* prepared) {
    begin_next();
    int chunk = blockIdx.x, key_head = blockIdx.y;
    if (threadIdx.x == 0) memory.number = -1;
    __syncthreads();
    for (int i = threadIdx.x; i < count; i += blockDim.x) {
        RunChunks chunks(Run(runs, i), i);
        if (chunks.first <= chunk && chunk < chunks.first + chunks.count) memory.number = i;
    }
    __syncthreads();
    int number = memory.number;
    if (number < 0) return;
    Run run(runs, number);
    RunChunks chunks(run, number);
    ChunkRows tokens(rows, layout.pitch(), runs, run, count, number, chunks.block + chunk - chunks.first);

    int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4, upper = 16 * warp + g;
    float keys[CHUNK / 8][4] = {}, queries[CHUNK / 8][4] = {};  // K Kᵀ and Q Kᵀ, at and below the diagonal
    wait_for_previous();
    memory.keys.copy(tokens, layout.key() + key_head * CHUNK_KEY);
    memory.queries.copy(tokens, layout.query() + key_head * CHUNK_KEY, tokens.replayed);
    close_copies();
    wait_copies<0>();
    __syncthreads();
#pragma unroll 2
    for (int i = t; i < CHUNK_KEY / 4; i += 4) {
        uint4 k0 = memory.keys.operand(upper, i), k1 = memory.keys.operand(upper + 8, i);
        uint4 q0 = memory.queries.operand(upper, i), q1 = memory.queries.operand(upper + 8, i);
#pragma unroll
        for (int n = 0; n < CHUNK / 8; ++n) {
            if (n > 2 * warp + 1) continue;
            uint4 column = memory.keys.operand(8 * n + g, i);
            multiply_add(keys[n], k0, k1, column);
            multiply_add(queries[n], q0, q1, column);
        }
    }

    int part = threadIdx.x / CHUNK, token = threadIdx.x % CHUNK;  // of the threads beside the products
    for (int begin = 0; begin < layout.shared(); begin += PREPARED_HEADS) {
        int heads = min(PREPARED_HEADS, layout.shared() - begin), head = key_head * layout.shared() + begin;
        Prepared* to = prepared + static_cast<i64>(chunk) * layout.value_heads + head;
        bool there = part < heads && token < tokens.tokens;
        const float* row = tokens.row(there ? token : 0);
        memory.logs[part][token] = there ? fmaxf(logf(row[layout.decay() + head + part]), -100.0f) : 0;
        memory.rates[part][token] = there ? row[layout.rate() + head + part] : 0;
        __syncthreads();  // now the vectors, and the heads before, are no longer read
        float sum = 0;
        for (int i = 0; i <= token; ++i) sum = __fadd_rn(sum, memory.logs[part][i]);
        memory.sums[part][token] = sum;
        __syncthreads();
        if (part < heads) {
            float all = tokens.final ? memory.sums[part][tokens.final - 1] : 0;
            to[part].decayed[token] = expf(sum);
            to[part].rate[token] = memory.rates[part][token];
            to[part].kept[token] = token < tokens.final ? expf(all - sum) : 0;
            if (token == 0) to[part].all[0] = expf(all);
        }
        for (int h = 0; h < heads; ++h) {
            const float* sums = memory.sums[h];
#pragma unroll
            for (int n = 0; n < CHUNK / 8; ++n) {
                if (n > 2 * warp + 1) continue;
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    int i = upper + 8 * half, j = 8 * n + 2 * t;
                    auto decay = [&](int column) { return column <= i ? expf(sums[i] - sums[column]) : 0; };
                    float2 by = make_float2(decay(j), decay(j + 1));
                    float2 mixed = make_float2(by.x * queries[n][2 * half], by.y * queries[n][2 * half + 1]);
                    *reinterpret_cast<float2*>(&to[h].mixing[i][j]) =
                        make_float2(__uint_as_float(to_tf32(mixed.x)), __uint_as_float(to_tf32(mixed.y)));
                    float rate = memory.rates[h][i];
                    memory.lower[h][j][i] = j < i ? rate * by.x * keys[n][2 * half] : 0;
                    memory.lower[h][j + 1][i] = j + 1 < i ? rate * by.y * keys[n][2 * half + 1] : 0;
                }
            }
        }
        // Above the diagonal L is 0: the blocks that have no product.
        for (int i = threadIdx.x; i < heads * CHUNK * CHUNK; i += blockDim.x) {
            int column = i / CHUNK % CHUNK, below = i % CHUNK;
            if (below / 16 < column / 16) memory.lower[i / (CHUNK * CHUNK)][column][below] = 0;
        }
        __syncthreads();
        for (int h = 0; h < heads; ++h) invert(memory.lower[h], memory.inverse[h], 16 * warp);
        __syncthreads();
        for (int i = threadIdx.x; i < heads * CHUNK * CHUNK / 4; i += blockDim.x) {
            int h = i / (CHUNK * CHUNK / 4), row = i / (CHUNK / 4) % CHUNK, unit = i % (CHUNK / 4);
            if (unit / 4 > row / 16) continue;  // never written, and never read
            *reinterpret_cast<uint4*>(&to[h].inverse[row][4 * unit]) = to_tf32(memory.inverse[h][row][unit]);
        }
        __syncthreads();
    }
}

// A matrix of shared memory by its columns, in units of four inner indices, so placed that neither the reads of eight
// columns nor the writes of rows meet in a bank.
template <int INNER>
struct Columns {
    uint4 units[INNER / 4];

    __device__ static int place(int unit, int column) {
        return unit ^ (((column ^ column >> 2) & 1) << 2 | (column >> 1 & 1) << 1);
    }
    __device__ uint4& at(int unit, int column) { return units[place(unit, column)]; }
    __device__ void set(int inner, int column, float x) {
        reinterpret_cast<u32*>(&at(inner / 4, column))[inner % 4] = to_tf32(x);
    }
};

// Shared memory of scan_chunks with DOWN times 8 TILES columns.
template <int DOWN>
struct Scanning {
    static constexpr int WIDTH = 8 * TILES * DOWN;
    ChunkVectors vectors[3];  // keys and queries of the chunk, and keys of the next one
    Columns<CHUNK_KEY> state[WIDTH];
    Columns<CHUNK> targets[WIDTH], changes[WIDTH];  // R and C
};
static_assert(sizeof(Scanning<2>) == 163840, "_SCAN_BYTES of linear_attention.py");

using OwnState = float[2][TILES][4];  // of a lane

// access(place in memory, pair) for all pairs of neighbouring columns; `first` is the place of the first.
template <class Access>
__device__ void each_pair(OwnState& state, float* first, int pitch, Access access) {
#pragma unroll
    for (int n = 0; n < TILES; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) access(first + i * pitch + 8 * n, &state[i / 2][n][i % 2 * 2]);
}

// The recurrence over the chunks of a run, for some columns of a head: grid (tiles of a run * runs), 32 ACROSS DOWN
// threads. A warp has 16 tokens of a chunk, and of the state 32 keys: keys 4 g to 4 g + 3 of them and columns 8 n + 2 t
// and 8 n + 2 t + 1 are of lane 4 g + t.
template <class Kind, int DOWN>
__device__ void scan_chunks(Scanning<DOWN>& memory, const float* rows, const float* skips, const Runs& runs, int count,
                            const Layout<Kind>& layout, const Prepared* prepared, float* states, float* mixtures) {
    static_assert(Kind::KD == CHUNK_KEY && CHUNK_KEY == 32 * ACROSS && CHUNK == 16 * ACROSS,
                  "of a warp: 32 keys, 16 tokens");
    constexpr int WIDTH = Scanning<DOWN>::WIDTH;
    begin_next();
    int slices = layout.value_dim / WIDTH, of_run = layout.value_heads * slices;
    int number = blockIdx.x / of_run, head = blockIdx.x % of_run / slices;
    Run run(runs, number);
    if (!run.count) return;
    int across = threadIdx.x / 32 % ACROSS, down = threadIdx.x / 32 / ACROSS;
    int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4, upper = 16 * across + g;
    int first = 8 * TILES * down, column = blockIdx.x % slices * WIDTH + first + 2 * t;  // of the block; of the head
    int of_key_head = head / layout.shared() * CHUNK_KEY;
    int key_at = layout.key() + of_key_head, query_at = layout.query() + of_key_head;
    int value_at = layout.value() + head * layout.value_dim + column;
    float* out = mixtures + head * layout.value_dim + column;
    i64 first_key = (run.slot * layout.value_heads + head) * CHUNK_KEY + 32 * across + 4 * g;
    float* of_head = states + first_key * layout.value_dim + column;

    OwnState state;
    each_pair(state, of_head, layout.value_dim, [&](float* from, float* x) {
        float2 y = run.covered > 0 ? *reinterpret_cast<const float2*>(from) : make_float2(0, 0);
        x[0] = y.x, x[1] = y.y;
    });
    float skip = skips[head];
    RunChunks chunks(run, number);
    auto rows_of = [&](int chunk) {
        return ChunkRows(rows, layout.pitch(), runs, run, count, number, chunks.block + chunk);
    };
    wait_for_previous();
    ChunkRows tokens = rows_of(0);
    ChunkVectors *keys = &memory.vectors[0], *queries = &memory.vectors[1], *next = &memory.vectors[2];
    keys->copy(tokens, key_at);
    queries->copy(tokens, query_at, tokens.replayed);
    close_copies();
#pragma unroll 1
    for (int chunk = 0; chunk < chunks.count; ++chunk) {
        const Prepared& ready = prepared[static_cast<i64>(chunks.first + chunk) * layout.value_heads + head];
        ChunkRows following = rows_of(min(chunk + 1, chunks.count - 1));
#pragma unroll
        for (int n = 0; n < TILES; ++n)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                float4 x = make_float4(state[0][n][i], state[0][n][2 + i], state[1][n][i], state[1][n][2 + i]);
                memory.state[first + 8 * n + 2 * t + i].at(8 * across + g, 2 * t + i) = to_tf32(x);
            }
        wait_copies<0>();
        __syncthreads();
        if (chunk + 1 < chunks.count) next->copy(following, key_at);
        close_copies();

        // What later steps need from memory, while the first one computes.
        float2 values[TILES][2];
        uint4 inverse[CHUNK / 16][2], mixing[CHUNK / 16][2];
        float4 kept[CHUNK / 16];
        float decayed[2], rate[2], all = ready.all[0];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            int token = upper + 8 * half;
            decayed[half] = ready.decayed[token], rate[half] = ready.rate[token];
#pragma unroll
            for (int n = 0; n < TILES; ++n) values[n][half] = tokens.two_of(token, value_at + 8 * n);
#pragma unroll
            for (int i = 0; i < CHUNK / 16; ++i) {
                if (i > across) continue;
                inverse[i][half] = *reinterpret_cast<const uint4*>(&ready.inverse[token][16 * i + 4 * t]);
                mixing[i][half] = *reinterpret_cast<const uint4*>(&ready.mixing[token][16 * i + 4 * t]);
            }
        }
#pragma unroll
        for (int i = 0; i < CHUNK / 16; ++i) kept[i] = *reinterpret_cast<const float4*>(&ready.kept[16 * i + 4 * t]);

        float seen[TILES][4] = {}, outputs[TILES][4] = {};  // K S and Q S
#pragma unroll 4
        for (int i = t; i < CHUNK_KEY / 4; i += 4) {
            uint4 k0 = keys->operand(upper, i), k1 = keys->operand(upper + 8, i);
            uint4 q0 = queries->operand(upper, i), q1 = queries->operand(upper + 8, i);
#pragma unroll
            for (int n = 0; n < TILES; ++n) {
                uint4 x = memory.state[first + 8 * n + g].at(i, g);
                multiply_add(seen[n], k0, k1, x);
                multiply_add(outputs[n], q0, q1, x);
            }
        }
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
            for (int n = 0; n < TILES; ++n) {
                int at = first + 8 * n + 2 * t;
                float *x = &seen[n][2 * half], *y = &outputs[n][2 * half];
                float2 value = values[n][half];
                memory.targets[at].set(upper + 8 * half, 2 * t, rate[half] * fmaf(-decayed[half], x[0], value.x));
                memory.targets[at + 1].set(upper + 8 * half, 2 * t + 1,
                                           rate[half] * fmaf(-decayed[half], x[1], value.y));
                y[0] *= decayed[half], y[1] *= decayed[half];
            }
        __syncthreads();
        if (chunk + 1 < chunks.count) queries->copy(following, query_at);
        close_copies();
        auto by_tokens = [&](const uint4(&matrix)[CHUNK / 16][2], Columns<CHUNK>* columns, float (&to)[TILES][4]) {
#pragma unroll
            for (int i = 0; i < CHUNK / 16; ++i) {
                if (i > across) continue;
#pragma unroll
                for (int n = 0; n < TILES; ++n)
                    multiply_add(to[n], matrix[i][0], matrix[i][1], columns[first + 8 * n + g].at(4 * i + t, g));
            }
        };
        float solved[TILES][4] = {};
        by_tokens(inverse, memory.targets, solved);
#pragma unroll
        for (int i = 0; i < 4; ++i)
#pragma unroll
            for (int n = 0; n < TILES; ++n)
                memory.changes[first + 8 * n + 2 * t + i % 2].set(upper + i / 2 * 8, 2 * t + i % 2, solved[n][i]);
        __syncthreads();
        by_tokens(mixing, memory.changes, outputs);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            int token = upper + 8 * half;
            if (token < tokens.replayed || token >= tokens.tokens) continue;
            float* to = out + (tokens.own + token - static_cast<i64>(count) * runs.replays) * layout.values();
#pragma unroll
            for (int n = 0; n < TILES; ++n)
                *reinterpret_cast<float2*>(to + 8 * n) =
                    make_float2(fmaf(skip, values[n][half].x, outputs[n][2 * half]),
                                fmaf(skip, values[n][half].y, outputs[n][2 * half + 1]));
        }
        each_pair(state, of_head, layout.value_dim, [&](float*, float* x) { x[0] *= all, x[1] *= all; });
#pragma unroll
        for (int i = 0; i < CHUNK / 16; ++i) {
            auto key = [&](int j, float by) {  // of token 16 i + 4 t + j
                float4 x = keys->four(16 * i + 4 * t + j, 8 * across + g);
                return to_tf32(make_float4(by * x.x, by * x.y, by * x.z, by * x.w));
            };
            uint4 k[4] = {key(0, kept[i].x), key(1, kept[i].y), key(2, kept[i].z), key(3, kept[i].w)};
#pragma unroll
            for (int n = 0; n < TILES; ++n) {
                uint4 c = memory.changes[first + 8 * n + g].at(4 * i + t, g);
                multiply_add(state[0][n], k[0].x, k[0].y, k[1].x, k[1].y, c.x, c.y);
                multiply_add(state[0][n], k[2].x, k[2].y, k[3].x, k[3].y, c.z, c.w);
                multiply_add(state[1][n], k[0].z, k[0].w, k[1].z, k[1].w, c.x, c.y);
                multiply_add(state[1][n], k[2].z, k[2].w, k[3].z, k[3].w, c.z, c.w);
            }
        }
        ChunkVectors* free = keys;
        keys = next, next = free;
        tokens = following;
    }
    each_pair(state, of_head, layout.value_dim,
              [&](float* to, float* x) { *reinterpret_cast<float2*>(to) = make_float2(x[0], x[1]); });
}
