// The delta rule for prompts, 64 tokens at a time by tensor cores. For a head whose state is S before a chunk, with the
// product g_i of the decays up to token i of the chunk:
//
//     L_ij = rate_i g_i / g_j (k_i · k_j) for j < i, T = (I + L)⁻¹, M_ij = g_i / g_j (q_i · k_j) for j <= i
//     C = T R with R_i = rate_i (v_i - g_i Sᵀ k_i); out_i = g_i Sᵀ q_i + Σ_j M_ij c_j; S = g_n S + Σ_j g_n / g_j k_j c_jᵀ
//
// (Yang et al., Gated Delta Networks, 2024, section 3.3). Chunks end before positions that are 63 modulo 64. A run that
// ends with a block of the cache leaves its last token to be replayed, so the next run begins with a chunk. Row i of every
// product needs the tokens up to i alone, so the bits of a token do not depend on how its prompt is cut at block ends.
#pragma once

#include "early.cuh"
#include "layout.cuh"
#include "runs.cuh"
#include "tf32.cuh"

constexpr int CHUNK = 64, CHUNK_WARPS = 4;  // tokens, 16 of them to a warp

// What prepare_chunks computes for a value head of a chunk.
struct Prepared {
    float inverse[CHUNK][CHUNK], mixing[CHUNK][CHUNK];      // T and M as operands, in the blocks of 16 x 16 at and below the diagonal
    float decayed[CHUNK], rate[CHUNK], kept[CHUNK], all[CHUNK];  // g_i; g_n / g_i, 0 if i is not final; all[0]: g_n
};

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
    __device__ const float* row(int token) const { return rows + (token < replayed ? earlier + token : own + token) * pitch; }

    // Values `at` to `at` + 3 of a token as operands, zeros of tokens before `begin` and of those that are not there.
    __device__ uint4 four(int token, int at, int begin = 0) const {
        bool there = begin <= token && token < tokens;
        return there ? to_tf32(*reinterpret_cast<const float4*>(row(token) + at)) : make_uint4(0, 0, 0, 0);
    }
    __device__ float2 two_of(int token, int at) const {
        return token < tokens ? *reinterpret_cast<const float2*>(row(token) + at) : make_float2(0, 0);
    }
};

constexpr int PREPARED_HEADS = 2;  // at once, a thread to a column of T of each

// Columns of T = (I + L)⁻¹ from L, a row after the other.
__device__ inline void invert(const float (&lower)[CHUNK][CHUNK + 8], float (&inverse)[CHUNK][CHUNK], int column) {
    float x[CHUNK];
#pragma unroll
    for (int i = 0; i < CHUNK; ++i) {
        float sums[4] = {i == column ? 1.0f : 0.0f, 0, 0, 0};
#pragma unroll
        for (int j = 0; j < i; j += 4) {
            float4 l = *reinterpret_cast<const float4*>(&lower[i][j]);
            sums[0] = fmaf(-l.x, x[j], sums[0]);
            if (j + 1 < i) sums[1] = fmaf(-l.y, x[j + 1], sums[1]);
            if (j + 2 < i) sums[2] = fmaf(-l.z, x[j + 2], sums[2]);
            if (j + 3 < i) sums[3] = fmaf(-l.w, x[j + 3], sums[3]);
        }
        x[i] = __fadd_rn(__fadd_rn(sums[0], sums[1]), __fadd_rn(sums[2], sums[3]));
        inverse[i][column] = __uint_as_float(to_tf32(x[i]));
    }
}

// Everything of a chunk that does not depend on the state, for the value heads of a key head. Grid (chunks, key heads).
template <class Kind>
__device__ void prepare_chunks(const float* rows, const Runs& runs, int count, const Layout<Kind>& layout,
                               Prepared* prepared) {
    __shared__ __align__(16) float lower[PREPARED_HEADS][CHUNK][CHUNK + 8];
    __shared__ float logs[PREPARED_HEADS][CHUNK], sums[PREPARED_HEADS][CHUNK], rates[PREPARED_HEADS][CHUNK];
    __shared__ int number;
    begin_next();
    int chunk = blockIdx.x, key_head = blockIdx.y;
    if (threadIdx.x == 0) number = -1;
    __syncthreads();
    for (int i = threadIdx.x; i < count; i += blockDim.x) {
        RunChunks chunks(Run(runs, i), i);
        if (chunks.first <= chunk && chunk < chunks.first + chunks.count) number = i;
    }
    __syncthreads();
    if (number < 0) return;
    Run run(runs, number);
    RunChunks chunks(run, number);
    ChunkRows tokens(rows, layout.pitch(), runs, run, count, number, chunks.block + chunk - chunks.first);

    int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4, upper = 16 * warp + g;
    int key_at = layout.key() + key_head * Kind::KD, query_at = layout.query() + key_head * Kind::KD;
    float keys[CHUNK / 8][4] = {}, queries[CHUNK / 8][4] = {};  // K Kᵀ and Q Kᵀ, at and below the diagonal
    wait_for_previous();
#pragma unroll 2
    for (int i = 4 * t; i < Kind::KD; i += 16) {
        uint4 k0 = tokens.four(upper, key_at + i), k1 = tokens.four(upper + 8, key_at + i);
        uint4 q0 = tokens.four(upper, query_at + i, tokens.replayed);
        uint4 q1 = tokens.four(upper + 8, query_at + i, tokens.replayed);
#pragma unroll
        for (int n = 0; n < CHUNK / 8; ++n) {
            if (n > 2 * warp + 1) continue;
            uint4 column = tokens.four(8 * n + g, key_at + i);
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
        __syncthreads();  // the heads before have read what follows
        logs[part][token] = there ? fmaxf(logf(row[layout.decay() + head + part]), -100.0f) : 0;
        rates[part][token] = there ? row[layout.rate() + head + part] : 0;
        __syncthreads();
        float sum = 0;
        for (int i = 0; i <= token; ++i) sum = __fadd_rn(sum, logs[part][i]);
        sums[part][token] = sum;
        __syncthreads();
        if (part < heads) {
            float all = tokens.final ? sums[part][tokens.final - 1] : 0;
            to[part].decayed[token] = expf(sum);
            to[part].rate[token] = rates[part][token];
            to[part].kept[token] = token < tokens.final ? expf(all - sum) : 0;
            if (token == 0) to[part].all[0] = expf(all);
        }
        for (int h = 0; h < heads; ++h) {
#pragma unroll
            for (int n = 0; n < CHUNK / 8; ++n) {
                if (n > 2 * warp + 1) continue;
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    int i = upper + 8 * half, j = 8 * n + 2 * t;
                    auto decay = [&](int column) { return column <= i ? expf(sums[h][i] - sums[h][column]) : 0; };
                    float2 by = make_float2(decay(j), decay(j + 1));
                    float2 mixed = make_float2(by.x * queries[n][2 * half], by.y * queries[n][2 * half + 1]);
                    *reinterpret_cast<float2*>(&to[h].mixing[i][j]) =
                        make_float2(__uint_as_float(to_tf32(mixed.x)), __uint_as_float(to_tf32(mixed.y)));
                    float rate = rates[h][i];
                    lower[h][i][j] = j < i ? rate * by.x * keys[n][2 * half] : 0;
                    lower[h][i][j + 1] = j + 1 < i ? rate * by.y * keys[n][2 * half + 1] : 0;
                }
            }
        }
        __syncthreads();
        if (part < heads) invert(lower[part], to[part].inverse, token);
    }
}

// Matrices of shared memory by columns, in units of four inner indices, so placed that neither the reads of eight columns
// nor the writes of rows meet in a bank.
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

// A state's columns 8 n + 2 t and 8 n + 2 t + 1 of the keys 32 warp + 4 g to 32 warp + 4 g + 3, for all n of NT.
template <int NT>
struct ChunkState {
    float at[2][NT][4];

    template <class Access>
    __device__ void each(Access access) {  // access(key, n, first of two values)
        int key = threadIdx.x / 32 * 32 + threadIdx.x % 32 / 4 * 4;
#pragma unroll
        for (int n = 0; n < NT; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) access(key + i, n, &at[i / 2][n][i % 2 * 2]);
    }
};

// The recurrence over the chunks of a run, for 8 NT columns of a head: grid (tiles of a run * runs), 128 threads.
template <class Kind, int NT>
__device__ void scan_chunks(const float* rows, const float* skips, const Runs& runs, int count,
                            const Layout<Kind>& layout, const Prepared* prepared, float* states, float* mixtures) {
    static_assert(Kind::KD == 32 * CHUNK_WARPS, "a warp has 32 keys");
    constexpr int WIDTH = 8 * NT;
    __shared__ Columns<Kind::KD> before[WIDTH];
    __shared__ Columns<CHUNK> targets[WIDTH], changes[WIDTH], kept[WIDTH];  // R, C, and C by g_n / g_j
    begin_next();
    int slices = layout.value_dim / WIDTH, of_run = layout.value_heads * slices;
    int number = blockIdx.x / of_run, head = blockIdx.x % of_run / slices, first = blockIdx.x % slices * WIDTH;
    Run run(runs, number);
    if (!run.count) return;
    int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4, upper = 16 * warp + g;
    int key_head = head / layout.shared();
    int key_at = layout.key() + key_head * Kind::KD, query_at = layout.query() + key_head * Kind::KD;
    int value_at = layout.value() + head * layout.value_dim + first + 2 * t;
    float* of_head = states + (run.slot * layout.value_heads + head) * Kind::KD * layout.value_dim + first + 2 * t;
    float* out = mixtures + head * layout.value_dim + first + 2 * t;

    ChunkState<NT> state;
    state.each([&](int key, int n, float* x) {
        float2 y = run.covered > 0 ? *reinterpret_cast<const float2*>(of_head + key * layout.value_dim + 8 * n)
                                   : make_float2(0, 0);
        x[0] = y.x, x[1] = y.y;
    });
    RunChunks chunks(run, number);
    wait_for_previous();
#pragma unroll 1
    for (int chunk = 0; chunk < chunks.count; ++chunk) {
        ChunkRows tokens(rows, layout.pitch(), runs, run, count, number, chunks.block + chunk);
        const Prepared& ready = prepared[static_cast<i64>(chunks.first + chunk) * layout.value_heads + head];
#pragma unroll
        for (int n = 0; n < NT; ++n)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                int column = 8 * n + 2 * t + i;
                float4 keys = make_float4(state.at[0][n][i], state.at[0][n][2 + i], state.at[1][n][i], state.at[1][n][2 + i]);
                before[column].at(8 * warp + g, column) = to_tf32(keys);
            }
        __syncthreads();
        float seen[NT][4] = {}, outputs[NT][4] = {};  // K S and Q S
#pragma unroll
        for (int i = 0; i < Kind::KD; i += 16) {
            uint4 k0 = tokens.four(upper, key_at + i + 4 * t), k1 = tokens.four(upper + 8, key_at + i + 4 * t);
            uint4 q0 = tokens.four(upper, query_at + i + 4 * t, tokens.replayed);
            uint4 q1 = tokens.four(upper + 8, query_at + i + 4 * t, tokens.replayed);
#pragma unroll
            for (int n = 0; n < NT; ++n) {
                uint4 column = before[8 * n + g].at(i / 4 + t, g);
                multiply_add(seen[n], k0, k1, column);
                multiply_add(outputs[n], q0, q1, column);
            }
        }
        float2 values[NT][2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            int token = upper + 8 * half;
            float decayed = ready.decayed[token], rate = ready.rate[token];
#pragma unroll
            for (int n = 0; n < NT; ++n) {
                float2 value = values[n][half] = tokens.two_of(token, value_at + 8 * n);
                float* x = &seen[n][2 * half];
                float* y = &outputs[n][2 * half];
                targets[8 * n + 2 * t].set(token, 2 * t, rate * fmaf(-decayed, x[0], value.x));
                targets[8 * n + 2 * t + 1].set(token, 2 * t + 1, rate * fmaf(-decayed, x[1], value.y));
                y[0] *= decayed, y[1] *= decayed;
            }
        }
        __syncthreads();
        auto by_tokens = [&](const float (&matrix)[CHUNK][CHUNK], Columns<CHUNK>* columns, float (&to)[NT][4]) {
#pragma unroll
            for (int i = 0; i < CHUNK; i += 16) {
                if (i > 16 * warp) continue;
                uint4 a0 = *reinterpret_cast<const uint4*>(&matrix[upper][i + 4 * t]);
                uint4 a1 = *reinterpret_cast<const uint4*>(&matrix[upper + 8][i + 4 * t]);
#pragma unroll
                for (int n = 0; n < NT; ++n) multiply_add(to[n], a0, a1, columns[8 * n + g].at(i / 4 + t, g));
            }
        };
        float solved[NT][4] = {};
        by_tokens(ready.inverse, targets, solved);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            int token = upper + 8 * half;
            float by = ready.kept[token];
#pragma unroll
            for (int n = 0; n < NT; ++n)
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    int column = 2 * t + i;
                    changes[8 * n + column].set(token, column, solved[n][2 * half + i]);
                    kept[8 * n + column].set(token, column, by * solved[n][2 * half + i]);
                }
        }
        __syncthreads();
        by_tokens(ready.mixing, changes, outputs);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            int token = upper + 8 * half;
            if (token < tokens.replayed || token >= tokens.tokens) continue;
            float* to = out + (tokens.own + token - static_cast<i64>(count) * runs.replays) * layout.values();
#pragma unroll
            for (int n = 0; n < NT; ++n) {
                float2 value = values[n][half];
                float x = fmaf(skips[head], value.x, outputs[n][2 * half]);
                float y = fmaf(skips[head], value.y, outputs[n][2 * half + 1]);
                *reinterpret_cast<float2*>(to + 8 * n) = make_float2(x, y);
            }
        }
        float all = ready.all[0];
        state.each([&](int, int, float* x) { x[0] *= all, x[1] *= all; });
#pragma unroll
        for (int i = 0; i < CHUNK; i += 16) {
            uint4 keys[4];  // of four tokens, four keys each
#pragma unroll
            for (int j = 0; j < 4; ++j) keys[j] = tokens.four(i + 4 * t + j, key_at + 32 * warp + 4 * g);
#pragma unroll
            for (int n = 0; n < NT; ++n) {
                uint4 b = kept[8 * n + g].at(i / 4 + t, g);
                multiply_add(state.at[0][n], keys[0].x, keys[0].y, keys[1].x, keys[1].y, b.x, b.y);
                multiply_add(state.at[0][n], keys[2].x, keys[2].y, keys[3].x, keys[3].y, b.z, b.w);
                multiply_add(state.at[1][n], keys[0].z, keys[0].w, keys[1].z, keys[1].w, b.x, b.y);
                multiply_add(state.at[1][n], keys[2].z, keys[2].w, keys[3].z, keys[3].w, b.z, b.w);
            }
        }
    }
    state.each([&](int key, int n, float* x) {
        *reinterpret_cast<float2*>(of_head + key * layout.value_dim + 8 * n) = make_float2(x[0], x[1]);
    });
}
