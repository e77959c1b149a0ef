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

#include "chunk_rows.cuh"
#include "early.cuh"
#include "tf32.cuh"

constexpr int ACROSS = 4;  // warps, each with 16 tokens, and with 32 keys of the state
constexpr int TILES = 4;   // of 8 columns, to a warp

// What prepare_chunks computes for a value head of a chunk.
struct Prepared {
    // T and M in float16, whose numbers are of the order of 1, in the blocks of 16 x 16 at and below the diagonal.
    u16 inverse[CHUNK][CHUNK], mixing[CHUNK][CHUNK];
    float decayed[CHUNK], rate[CHUNK], kept[CHUNK], all[CHUNK];  // g_i; g_n / g_i, 0 if i is not final; all[0]: g_n
};
static_assert(sizeof(Prepared) == 4 * (64 * 64 + 4 * 64), "_PREPARED of linear_attention.py");

constexpr int PREPARED_HEADS = 2;  // at once
using Lower = float[CHUNK][CHUNK + 4];

// Shared memory of prepare_chunks.
struct Preparing {
    union {
        struct { ChunkVectors keys, queries; };
        struct {
            Lower lower[PREPARED_HEADS];  // the transposed L, at and below the diagonal
            float inverse[PREPARED_HEADS][CHUNK][CHUNK];
        };
    };
    float sums[PREPARED_HEADS][CHUNK], rates[PREPARED_HEADS][CHUNK];
    int number;
};
static_assert(sizeof(Preparing) == 68624, "_PREPARE_BYTES of linear_attention.py");

// A column of T = (I + L)⁻¹, by one thread, which reads nothing that others write.
__device__ inline void invert(const Lower& lower, float (&inverse)[CHUNK][CHUNK], int column) {
    constexpr int ROWS = 8;
    int begin = column / 32 * 32;  // the rows above are 0 for all columns of a warp
#pragma unroll 1
    for (int block = begin; block < CHUNK; block += ROWS) {
        float x[ROWS];
#pragma unroll
        for (int r = 0; r < ROWS; ++r) x[r] = block + r == column;
#pragma unroll 4
        for (int row = begin; row < block; ++row) {
            float complete = -inverse[row][column];
            float4 a = *reinterpret_cast<const float4*>(&lower[row][block]);
            float4 b = *reinterpret_cast<const float4*>(&lower[row][block + 4]);
            x[0] = fmaf(a.x, complete, x[0]), x[1] = fmaf(a.y, complete, x[1]);
            x[2] = fmaf(a.z, complete, x[2]), x[3] = fmaf(a.w, complete, x[3]);
            x[4] = fmaf(b.x, complete, x[4]), x[5] = fmaf(b.y, complete, x[5]);
            x[6] = fmaf(b.z, complete, x[6]), x[7] = fmaf(b.w, complete, x[7]);
        }
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            inverse[block + r][column] = x[r];
#pragma unroll
            for (int later = r + 1; later < ROWS; ++later)
                x[later] = fmaf(-lower[block + r][block + later], x[r], x[later]);
        }
    }
}

// Logarithm of the product of decays up to each token, by the threads of its 64 tokens; `sums` is theirs.
__device__ inline float sum_of_logs(float x, float (&sums)[CHUNK], int token, bool there) {
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
        float earlier = __shfl_up_sync(0xffffffffu, x, distance);
        if (lane >= distance) x = __fadd_rn(x, earlier);
    }
    if (there) sums[token] = x;
    __syncthreads();
    if (there && token >= 32) x = __fadd_rn(sums[31], x);
    __syncthreads();
    if (there) sums[token] = x;
    return x;
}

// Everything of a chunk that does not depend on the state, for the value heads of a key head. Grid (chunks, key heads),
// 64 ACROSS threads: the first half multiplies keys by keys, the other one queries by keys.
template <class Kind>
__device__ void prepare_chunks(Preparing& memory, const u8* rows, const Runs& runs, int count,
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
    ChunkRow<Kind> parts(layout);
    ChunkRows tokens(rows, parts.pitch(), runs, run, count, number, chunks.block + chunk - chunks.first);

    int warp = threadIdx.x / 32 % ACROSS, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4, upper = 16 * warp + g;
    bool of_queries = threadIdx.x >= 32 * ACROSS;
    float products[CHUNK / 8][4] = {};  // at and below the diagonal
    wait_for_previous();
    memory.keys.copy<64 * ACROSS>(tokens, parts.key() + 2 * key_head * CHUNK_KEY);
    memory.queries.copy<64 * ACROSS>(tokens, parts.query() + 2 * key_head * CHUNK_KEY, tokens.replayed);
    close_copies();
    wait_copies<0>();
    __syncthreads();
    const ChunkVectors& left = of_queries ? memory.queries : memory.keys;
#pragma unroll 2
    for (int i = t; i < CHUNK_KEY / 4; i += 4) {
        // As in multiply_add, lanes have four neighbouring inner indices.
        uint2 above = left.unit(upper, i), below = left.unit(upper + 8, i);
        u32 operand[4] = {above.x, below.x, above.y, below.y};
#pragma unroll
        for (int n = 0; n < CHUNK / 8; ++n) {
            if (n > 2 * warp + 1) continue;
            uint2 column = memory.keys.unit(8 * n + g, i);
            Fp16::mma(products[n], operand, column.x, column.y);
        }
    }

    int part = threadIdx.x / CHUNK, token = threadIdx.x % CHUNK;  // of the threads beside the products
    for (int begin = 0; begin < layout.shared(); begin += PREPARED_HEADS) {
        int heads = min(PREPARED_HEADS, layout.shared() - begin), head = key_head * layout.shared() + begin;
        Prepared* to = prepared + static_cast<i64>(chunk) * layout.value_heads + head;
        bool own = part < heads, there = own && token < tokens.tokens;
        float log = there ? tokens.number(token, parts.log_decay() + 4 * (head + part)) : 0;
        if (own) memory.rates[part][token] = there ? tokens.number(token, parts.rate() + 4 * (head + part)) : 0;
        float sum = sum_of_logs(log, memory.sums[own ? part : 0], token, own);
        __syncthreads();  // now the vectors, and the heads before, are no longer read
        if (own) {
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
                    float x = decay(j) * products[n][2 * half], y = decay(j + 1) * products[n][2 * half + 1];
                    if (of_queries) {
                        Fp16::store2(&to[h].mixing[i][j], make_float2(x, y));
                    } else {
                        float rate = memory.rates[h][i];
                        memory.lower[h][j][i] = j < i ? rate * x : 0;
                        memory.lower[h][j + 1][i] = j + 1 < i ? rate * y : 0;
                    }
                }
            }
        }
        __syncthreads();
        if (own) invert(memory.lower[part], memory.inverse[part], token);
        __syncthreads();
        constexpr int UNITS = CHUNK / 8;  // of eight values
        for (int i = threadIdx.x; i < heads * CHUNK * UNITS; i += blockDim.x) {
            int h = i / (CHUNK * UNITS), row = i / UNITS % CHUNK, unit = i % UNITS;
            if (unit / 2 > row / 16) continue;  // never written, and never read
            const float4* x = reinterpret_cast<const float4*>(&memory.inverse[h][row][8 * unit]);
            uint4 bits = make_uint4(Fp16::pack(make_float2(x[0].x, x[0].y)), Fp16::pack(make_float2(x[0].z, x[0].w)),
                                    Fp16::pack(make_float2(x[1].x, x[1].y)), Fp16::pack(make_float2(x[1].z, x[1].w)));
            *reinterpret_cast<uint4*>(&to[h].inverse[row][8 * unit]) = bits;
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
static_assert(sizeof(Scanning<1>) == 81920, "_SCAN_BYTES of linear_attention.py");

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
template <class T, class Kind, int DOWN>
__device__ void scan_chunks(Scanning<DOWN>& memory, const u8* rows, const float* skips, const Runs& runs, int count,
                            const Layout<Kind>& layout, const Prepared* prepared, float* states, float* mixtures) {
    static_assert(Kind::KD == CHUNK_KEY && CHUNK_KEY == 32 * ACROSS && CHUNK == 16 * ACROSS,
                  "of a warp: 32 keys, 16 tokens");
    constexpr int WIDTH = Scanning<DOWN>::WIDTH, THREADS = 32 * ACROSS * DOWN;
    begin_next();
    int slices = layout.value_dim / WIDTH, of_run = layout.value_heads * slices;
    int number = blockIdx.x / of_run, head = blockIdx.x % of_run / slices;
    Run run(runs, number);
    if (!run.count) return;
    int across = threadIdx.x / 32 % ACROSS, down = threadIdx.x / 32 / ACROSS;
    int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4, upper = 16 * across + g;
    int first = 8 * TILES * down, column = blockIdx.x % slices * WIDTH + first + 2 * t;  // of the block; of the head
    ChunkRow<Kind> parts(layout);
    int of_key_head = 2 * (head / layout.shared() * CHUNK_KEY);
    int key_at = parts.key() + of_key_head, query_at = parts.query() + of_key_head;
    int value_at = parts.value() + 2 * (head * layout.value_dim + column);
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
        return ChunkRows(rows, parts.pitch(), runs, run, count, number, chunks.block + chunk);
    };
    wait_for_previous();
    ChunkRows tokens = rows_of(0);
    ChunkVectors *keys = &memory.vectors[0], *queries = &memory.vectors[1], *next = &memory.vectors[2];
    keys->copy<THREADS>(tokens, key_at);
    queries->copy<THREADS>(tokens, query_at, tokens.replayed);
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
        if (chunk + 1 < chunks.count) next->copy<THREADS>(following, key_at);
        close_copies();

        // What later steps need from memory, while the first one computes.
        u32 values[TILES][2];
        uint2 inverse[CHUNK / 16][2], mixing[CHUNK / 16][2];
        float4 kept[CHUNK / 16];
        float decayed[2], rate[2], all = ready.all[0];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            int token = upper + 8 * half;
            decayed[half] = ready.decayed[token], rate[half] = ready.rate[token];
#pragma unroll
            for (int n = 0; n < TILES; ++n) values[n][half] = tokens.pair(token, value_at + 2 * 8 * n);
#pragma unroll
            for (int i = 0; i < CHUNK / 16; ++i) {
                if (i > across) continue;
                inverse[i][half] = *reinterpret_cast<const uint2*>(&ready.inverse[token][16 * i + 4 * t]);
                mixing[i][half] = *reinterpret_cast<const uint2*>(&ready.mixing[token][16 * i + 4 * t]);
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
                float2 value = T::unpack(values[n][half]);
                memory.targets[at].set(upper + 8 * half, 2 * t, rate[half] * fmaf(-decayed[half], x[0], value.x));
                memory.targets[at + 1].set(upper + 8 * half, 2 * t + 1,
                                           rate[half] * fmaf(-decayed[half], x[1], value.y));
                y[0] *= decayed[half], y[1] *= decayed[half];
            }
        __syncthreads();
        if (chunk + 1 < chunks.count) queries->copy<THREADS>(following, query_at);
        close_copies();
        auto by_tokens = [&](const uint2(&matrix)[CHUNK / 16][2], Columns<CHUNK>* columns, float (&to)[TILES][4]) {
#pragma unroll
            for (int i = 0; i < CHUNK / 16; ++i) {
                if (i > across) continue;
                uint4 above = operand_of(matrix[i][0]), below = operand_of(matrix[i][1]);
#pragma unroll
                for (int n = 0; n < TILES; ++n)
                    multiply_add(to[n], above, below, columns[first + 8 * n + g].at(4 * i + t, g));
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
            for (int n = 0; n < TILES; ++n) {
                float2 value = T::unpack(values[n][half]);
                *reinterpret_cast<float2*>(to + 8 * n) = make_float2(fmaf(skip, value.x, outputs[n][2 * half]),
                                                                     fmaf(skip, value.y, outputs[n][2 * half + 1]));
            }
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
