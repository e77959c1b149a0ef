// Rows of the workspace with the tokens of prompts that are processed in chunks, 64 tokens at a time.
//
// Queries and keys are float16: unit vectors, whose numbers keep the 10 bits of a fraction that tensor cores read of
// float32 (TF32). Values have the dtype of the model, decays are logarithms.
#pragma once

#include "copy.cuh"
#include "layout.cuh"
#include "runs.cuh"

constexpr int CHUNK = 64, CHUNK_KEY = 128;  // tokens of a chunk, values of a key

// Where a row has its parts, in bytes. Rows, queries, keys and values of a head are aligned to 16 bytes.
template <class Kind>
struct ChunkRow {
    int keys, values, value_heads;

    __device__ explicit ChunkRow(const Layout<Kind>& layout)
        : keys(layout.keys()), values(layout.values()), value_heads(layout.value_heads) {}
    __device__ int query() const { return 0; }
    __device__ int key() const { return 2 * keys; }
    __device__ int value() const { return 4 * keys; }
    __device__ int log_decay() const { return 4 * keys + 2 * values; }
    __device__ int rate() const { return log_decay() + 4 * value_heads; }
    __device__ int pitch() const { return (rate() + 4 * value_heads + 15) / 16 * 16; }
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
    const u8* rows;
    int pitch, tokens, replayed, final;  // `final` tokens change the state; the first `replayed` have no output
    i64 earlier, own;                    // rows of the first token, if it is replayed and if not

    __device__ ChunkRows(const u8* from, int width, const Runs& runs, const Run& run, int count, int number, i64 block)
        : rows(from), pitch(width) {
        i64 begin = max(run.covered, block * CHUNK - 1), end = run.index + run.count;
        tokens = static_cast<int>(min(end, block * CHUNK + CHUNK - 1) - begin);
        final = static_cast<int>(min(end - 1 - begin, static_cast<i64>(tokens)));
        replayed = static_cast<int>(max(run.index - begin, i64(0)));
        earlier = static_cast<i64>(number + 1) * runs.replays - (run.index - begin);
        own = static_cast<i64>(count) * runs.replays + run.first + begin - run.index;
    }
    __device__ const u8* row(int token) const {
        return rows + (token < replayed ? earlier + token : own + token) * pitch;
    }
    __device__ float number(int token, int at) const { return *reinterpret_cast<const float*>(row(token) + at); }
    __device__ u32 pair(int token, int at) const {  // of 16-bit values
        return token < tokens ? *reinterpret_cast<const u32*>(row(token) + at) : 0;
    }
};

// Four numbers of float16, and as operands of TF32, which keeps all of their bits.
__device__ inline float4 four_of(uint2 bits) {
    float2 a = Fp16::unpack(bits.x), b = Fp16::unpack(bits.y);
    return make_float4(a.x, a.y, b.x, b.y);
}
__device__ inline uint4 operand_of(uint2 bits) {
    float4 x = four_of(bits);
    return make_uint4(__float_as_uint(x.x), __float_as_uint(x.y), __float_as_uint(x.z), __float_as_uint(x.w));
}

// Keys or queries of a chunk in shared memory, read in units of four values. Lanes that read units of the same index of
// four neighbouring tokens, or of every fourth token, do not meet in a bank.
struct ChunkVectors {
    static constexpr int PIECES = CHUNK_KEY / 8;  // of 16 bytes: two units
    uint4 pieces[CHUNK][PIECES];

    __device__ static int place(int piece, int token) { return piece ^ ((token ^ token >> 2) & 3) << 1; }
    __device__ uint2 unit(int token, int i) const {
        return reinterpret_cast<const uint2*>(&pieces[token][place(i / 2, token)])[i % 2];
    }
    __device__ float4 four(int token, int i) const { return four_of(unit(token, i)); }
    __device__ uint4 operand(int token, int i) const { return operand_of(unit(token, i)); }

    // Start copies of the vectors that begin `at` bytes into rows; zeros of tokens before `begin` and of missing ones.
    // Called by THREADS threads.
    template <int THREADS>
    __device__ void copy(const ChunkRows& tokens, int at, int begin = 0) {
        constexpr int STEP = THREADS / PIECES;  // tokens at once
        int piece = threadIdx.x % PIECES, first = threadIdx.x / PIECES;
        const u8* column = tokens.rows + at + 16 * piece;
        const u8 *own = column + tokens.own * tokens.pitch, *earlier = column + tokens.earlier * tokens.pitch;
#pragma unroll
        for (int i = 0; i < CHUNK / STEP; ++i) {
            int token = first + STEP * i;
            bool there = begin <= token && token < tokens.tokens;
            const u8* from = (token < tokens.replayed ? earlier : own) + token * tokens.pitch;
            copy16(shared_address(&pieces[token][place(piece, token)]), there ? from : tokens.rows, there);
        }
    }
};
