// Queries on their way from the projection to the registers of the tensor core matmul.
#pragma once

#include "attention_head.cuh"

// Queries of a warp's 16 rows as A fragments, as projected. Nothing here depends on the row's length.
template <class T, int D>
__device__ void load_queries(u32 (&q)[D / 16][4], const Operands<T>& x, int row, int kv_head, int first) {
    int lane = threadIdx.x % 32, group = x.heads / x.kv_heads;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        int packed = first + lane / 4 + 8 * half, token = packed / group;
        bool there = token < x.query;
        const auto* from = x.projected(row, there ? token : 0, kv_head * group + packed % group, D);
#pragma unroll
        for (int c = 0; c < D / 8; ++c) q[c / 2][half + 2 * (c % 2)] = there ? two(from + T::column(c)) : 0;
    }
}

// Factors of a warp's queries, as stored: loaded together, before the first wait.
template <class T, int D>
struct Factors {
    u32 cosine[2][D / 16], sine[2][D / 16], norm[D / 8];

    __device__ Factors(const Operands<T>& x, int first, int start) {
        int lane = threadIdx.x % 32, group = x.heads / x.kv_heads;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            int token = min((first + lane / 4 + 8 * half) / group, x.query - 1);
            i64 at = static_cast<i64>(start + token) * (D / 2);
#pragma unroll
            for (int c = 0; c < D / 16; ++c) {
                cosine[half][c] = two(x.cosine + at + T::column(c));
                sine[half][c] = two(x.sine + at + T::column(c));
            }
        }
#pragma unroll
        for (int c = 0; c < D / 8; ++c) norm[c] = x.q_norm ? two(x.q_norm + T::column(c)) : 0;
    }
};

// Norm and rotary embedding of a thread's part of a row, rounded to the dtype of the tiles. They include the scale of
// the scores, in units of log 2.
template <class T, int D>
__device__ void prepare_row(u32 (&row)[D / 8], const Operands<T>& x, const u32 (&cosine)[D / 16],
                            const u32 (&sine)[D / 16], const u32 (&norms)[D / 8]) {
    float2 scale = make_float2(x.scale * LOG2_E, x.scale * LOG2_E);
    float2 part[D / 8];
    float squares = 0;
#pragma unroll
    for (int c = 0; c < D / 8; ++c) {
        part[c] = T::unpack(row[c]);
        squares += part[c].x * part[c].x + part[c].y * part[c].y;
    }
    if (x.q_norm) {
        squares += __shfl_xor_sync(0xffffffffu, squares, 1);
        squares += __shfl_xor_sync(0xffffffffu, squares, 2);
        float norm = rsqrtf(squares / D + x.epsilon);
#pragma unroll
        for (int c = 0; c < D / 8; ++c) part[c] = times(part[c], T::unpack(norms[c]), norm);
    }
#pragma unroll
    for (int c = 0; c < D / 16; ++c) turn(part[c], part[c + D / 16], T::unpack(cosine[c]), T::unpack(sine[c]));
#pragma unroll
    for (int c = 0; c < D / 8; ++c) row[c] = T::Tile::pack(times(part[c], scale, 1));
}

// As above, for the rows of a warp.
template <class T, int D>
__device__ void prepare_queries(u32 (&q)[D / 16][4], const Operands<T>& x, const Factors<T, D>& by) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        u32 row[D / 8];
#pragma unroll
        for (int c = 0; c < D / 8; ++c) row[c] = q[c / 2][half + 2 * (c % 2)];
        prepare_row<T, D>(row, x, by.cosine[half], by.sine[half], by.norm);
#pragma unroll
        for (int c = 0; c < D / 8; ++c) q[c / 2][half + 2 * (c % 2)] = row[c];
    }
}

// The same in half the code: one row of a thread after the other. Where a thread has one row alone, its other one, of
// which nothing is read, becomes a copy.
template <class T, int D>
__device__ void prepare_few_queries(u32 (&q)[D / 16][4], const Operands<T>& x, Factors<T, D> by) {
    bool both = x.query * (x.heads / x.kv_heads) > 8;
#pragma unroll 1
    for (int more = both; more >= 0; --more) {
        u32 row[D / 8];
#pragma unroll
        for (int c = 0; c < D / 8; ++c) row[c] = q[c / 2][2 * (c % 2)];
        prepare_row<T, D>(row, x, by.cosine[0], by.sine[0], by.norm);
#pragma unroll
        for (int c = 0; c < D / 8; ++c) {  // the other row is next, and its result comes to the same place
            q[c / 2][2 * (c % 2)] = both ? q[c / 2][1 + 2 * (c % 2)] : row[c];
            q[c / 2][1 + 2 * (c % 2)] = row[c];
        }
#pragma unroll
        for (int c = 0; c < D / 16; ++c) by.cosine[0][c] = by.cosine[1][c], by.sine[0][c] = by.sine[1][c];
    }
}

// Queries of windows, as they come from the projection. FEW: of at most 16 rows, in less code.
template <class T, int D, bool FEW = false>
struct ProjectedQueries {
    __device__ void load(u32 (&q)[D / 16][4], const Operands<T>& x, int row, int kv_head, int first) const {
        load_queries<T, D>(q, x, row, kv_head, first);
    }
    __device__ void prepare(u32 (&q)[D / 16][4], const Operands<T>& x, int first, int start) const {
        if constexpr (FEW) prepare_few_queries<T, D>(q, x, Factors<T, D>(x, first, start));
        else prepare_queries<T, D>(q, x, Factors<T, D>(x, first, start));
    }
};
