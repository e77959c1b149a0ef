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

// Norm and rotary embedding of those queries, rounded to the dtype of the tiles. They include the scale of the scores,
// in units of log 2.
template <class T, int D>
__device__ void prepare_queries(u32 (&q)[D / 16][4], const Operands<T>& x, const Factors<T, D>& by) {
    float2 scale = make_float2(x.scale * LOG2_E, x.scale * LOG2_E);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        float2 part[D / 8];
        float squares = 0;
#pragma unroll
        for (int c = 0; c < D / 8; ++c) {
            part[c] = T::unpack(q[c / 2][half + 2 * (c % 2)]);
            squares += part[c].x * part[c].x + part[c].y * part[c].y;
        }
        if (x.q_norm) {
            squares += __shfl_xor_sync(0xffffffffu, squares, 1);
            squares += __shfl_xor_sync(0xffffffffu, squares, 2);
            float norm = rsqrtf(squares / D + x.epsilon);
#pragma unroll
            for (int c = 0; c < D / 8; ++c) part[c] = times(part[c], T::unpack(by.norm[c]), norm);
        }
#pragma unroll
        for (int c = 0; c < D / 16; ++c)
            turn(part[c], part[c + D / 16], T::unpack(by.cosine[half][c]), T::unpack(by.sine[half][c]));
#pragma unroll
        for (int c = 0; c < D / 8; ++c) q[c / 2][half + 2 * (c % 2)] = T::Tile::pack(times(part[c], scale, 1));
    }
}

// Queries of windows, as they come from the projection.
template <class T, int D>
struct ProjectedQueries {
    __device__ void load(u32 (&q)[D / 16][4], const Operands<T>& x, int row, int kv_head, int first) const {
        load_queries<T, D>(q, x, row, kv_head, first);
    }
    __device__ void prepare(u32 (&q)[D / 16][4], const Operands<T>& x, int first, int start) const {
        prepare_queries<T, D>(q, x, Factors<T, D>(x, first, start));
    }
};
