// gated_linear: a matmul with the gates and the ups of an MLP, and their product in its epilogue, for many rows on
// Hopper. Sums are in the order of cuBLASLt's algorithms without split-K, and rounded before the product, so the bits
// are those of linear and swiglu (gated_linear.py tries it), and gates and ups are never written.
//
// A cluster of two blocks computes 256 rows: a block its 128 rows of a tile's outputs, with their gates and ups from
// the weight, of which each block copies one half to both. Two warpgroups multiply 64 rows each, a third one copies.
// Blocks stay for many tiles; those that run at the same time have neighbouring outputs of the same rows, which the L2
// cache holds.
#pragma once
#include "cluster.cuh"
#include "swiglu.cuh"
#include "warpgroup.cuh"

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

constexpr int GROUP_ROWS = 64, BLOCK_ROWS = 128, OUTPUTS = 128;  // of a tile
constexpr int INPUTS = LINE / 2;                                 // of a step
constexpr int BOX = 128 * LINE, STAGE = 3 * BOX, STAGES = 4;     // bytes: of rows, gates and ups
constexpr int STORED = GROUP_ROWS * LINE;                        // bytes of a box of the result
constexpr int BAND = 8;                                          // clusters, see tile_of

__device__ __forceinline__ void create_counter(u32 barrier, int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}
__device__ __forceinline__ void arrive_in(u32 barrier, int rank) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(address_in(barrier, rank)) : "memory");
}
// copy_box to both blocks of a cluster, at the same address; each is told by its own barrier.
__device__ __forceinline__ void copy_box_to_both(u32 to, const void* tensor, int column, int row, u32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
        "[%1, {%2, %3}], [%4], %5;" ::"r"(to),
        "l"(tensor), "r"(column), "r"(row), "r"(barrier), "h"(static_cast<u16>(3))
        : "memory");
}
__device__ __forceinline__ void store_box(const void* tensor, int column, int row, u32 from) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%1, %2}], [%3];" ::"l"(tensor),
                 "r"(column), "r"(row), "r"(from)
                 : "memory");
}
__device__ __forceinline__ void store_matrices(u32 to, const u32 (&x)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(x[0]), "r"(x[1]),
                 "r"(x[2]), "r"(x[3])
                 : "memory");
}

// c[64 rows x 256 lines] = a[64 x 16] b[256 x 16].T, added to c if `add`. Asynchronous.
template <class T>
__device__ __forceinline__ void multiply(float (&c)[128], u64 a, u64 b, int add);
#define MULTIPLY(TYPE)                                                                                                 \
    asm volatile(                                                                                                      \
        "{ .reg .pred add;\nsetp.ne.b32 add, %130, 0;\n"                                                               \
        "wgmma.mma_async.sync.aligned.m64n256k16.f32." TYPE "." TYPE                                                   \
        " {"                                                                                                           \
        "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,"           \
        "%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,"         \
        "%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63,%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,"         \
        "%77,%78,%79,%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95,%96,%97,%98,%99,%100,"            \
        "%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,%112,%113,%114,%115,%116,%117,%118,%119,%120,"         \
        "%121,%122,%123,%124,%125,%126,%127"                                                                           \
        "}, %128, %129, add, 1, 1, 0, 0; }"                                                                            \
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]), "+f"(c[7]), "+f"(c[8]),  \
          "+f"(c[9]), "+f"(c[10]), "+f"(c[11]), "+f"(c[12]), "+f"(c[13]), "+f"(c[14]), "+f"(c[15]), "+f"(c[16]),       \
          "+f"(c[17]), "+f"(c[18]), "+f"(c[19]), "+f"(c[20]), "+f"(c[21]), "+f"(c[22]), "+f"(c[23]), "+f"(c[24]),      \
          "+f"(c[25]), "+f"(c[26]), "+f"(c[27]), "+f"(c[28]), "+f"(c[29]), "+f"(c[30]), "+f"(c[31]), "+f"(c[32]),      \
          "+f"(c[33]), "+f"(c[34]), "+f"(c[35]), "+f"(c[36]), "+f"(c[37]), "+f"(c[38]), "+f"(c[39]), "+f"(c[40]),      \
          "+f"(c[41]), "+f"(c[42]), "+f"(c[43]), "+f"(c[44]), "+f"(c[45]), "+f"(c[46]), "+f"(c[47]), "+f"(c[48]),      \
          "+f"(c[49]), "+f"(c[50]), "+f"(c[51]), "+f"(c[52]), "+f"(c[53]), "+f"(c[54]), "+f"(c[55]), "+f"(c[56]),      \
          "+f"(c[57]), "+f"(c[58]), "+f"(c[59]), "+f"(c[60]), "+f"(c[61]), "+f"(c[62]), "+f"(c[63]), "+f"(c[64]),      \
          "+f"(c[65]), "+f"(c[66]), "+f"(c[67]), "+f"(c[68]), "+f"(c[69]), "+f"(c[70]), "+f"(c[71]), "+f"(c[72]),      \
          "+f"(c[73]), "+f"(c[74]), "+f"(c[75]), "+f"(c[76]), "+f"(c[77]), "+f"(c[78]), "+f"(c[79]), "+f"(c[80]),      \
          "+f"(c[81]), "+f"(c[82]), "+f"(c[83]), "+f"(c[84]), "+f"(c[85]), "+f"(c[86]), "+f"(c[87]), "+f"(c[88]),      \
          "+f"(c[89]), "+f"(c[90]), "+f"(c[91]), "+f"(c[92]), "+f"(c[93]), "+f"(c[94]), "+f"(c[95]), "+f"(c[96]),      \
          "+f"(c[97]), "+f"(c[98]), "+f"(c[99]), "+f"(c[100]), "+f"(c[101]), "+f"(c[102]), "+f"(c[103]), "+f"(c[104]), \
          "+f"(c[105]), "+f"(c[106]), "+f"(c[107]), "+f"(c[108]), "+f"(c[109]), "+f"(c[110]), "+f"(c[111]),            \
          "+f"(c[112]), "+f"(c[113]), "+f"(c[114]), "+f"(c[115]), "+f"(c[116]), "+f"(c[117]), "+f"(c[118]),            \
          "+f"(c[119]), "+f"(c[120]), "+f"(c[121]), "+f"(c[122]), "+f"(c[123]), "+f"(c[124]), "+f"(c[125]),            \
          "+f"(c[126]), "+f"(c[127])                                                                                   \
        : "l"(a), "l"(b), "r"(add));
template <>
__device__ __forceinline__ void multiply<Bf16>(float (&c)[128], u64 a, u64 b, int add) {
    MULTIPLY("bf16")
}
template <>
__device__ __forceinline__ void multiply<Fp16>(float (&c)[128], u64 a, u64 b, int add) {
    MULTIPLY("f16")
}
#undef MULTIPLY

// The first row and output of a tile: clusters go down the rows of a band before the next outputs.
struct Tile { int row, output; };
__device__ __forceinline__ Tile tile_of(int tile, int pairs, int across, int rank) {
    int band = tile / (BAND * across), left = tile - band * BAND * across, high = min(BAND, pairs - band * BAND);
    return {((band * BAND + left % high) * 2 + rank) * BLOCK_ROWS, left / high * OUTPUTS};
}

// The boxes: of x and the weight 128 lines of 64 inputs, of out GROUP_ROWS lines of 64 outputs. Two blocks per cluster.
template <class T>
__device__ void gated_linear(const void* x, const void* weight, const void* out, int rows, int width, int inner) {
    extern __shared__ __align__(1024) unsigned char memory[];  // [STAGES][STAGE], [2 groups][2][STORED]
    __shared__ u64 full[STAGES], empty[STAGES];
    int group = threadIdx.x / GROUP, rank = cluster_rank();
    u32 ring = shared_address(memory), full_at = shared_address(full), empty_at = shared_address(empty);
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; ++i) {
            create_barrier(full_at + 8 * i);
            create_counter(empty_at + 8 * i, 4);  // the multiplying groups of both blocks
        }
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    arrive_at_cluster();
    wait_for_cluster();
    int steps = (inner + INPUTS - 1) / INPUTS, across = (width + OUTPUTS - 1) / OUTPUTS;
    int pairs = (rows + 2 * BLOCK_ROWS - 1) / (2 * BLOCK_ROWS), clusters = gridDim.x / 2;
    int stage = 0, phase = 0;
    auto next_stage = [&] {
        if (++stage == STAGES) stage = 0, phase ^= 1;
    };
    if (group == 0) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        if (threadIdx.x == 0) {
            for (int i = blockIdx.x / 2; i < pairs * across; i += clusters) {
                Tile tile = tile_of(i, pairs, across, rank);
                for (int k = 0; k < steps; ++k, next_stage()) {
                    wait_for_bytes(empty_at + 8 * stage, phase ^ 1);
                    u32 to = ring + stage * STAGE, done = full_at + 8 * stage;
                    announce_bytes(done, STAGE);
                    copy_box(to, x, k * INPUTS, tile.row, done);
                    int line = tile.output + rank * width;  // gates, or ups
                    copy_box_to_both(to + BOX + rank * BOX, weight, k * INPUTS, line, done);
                }
            }
        }
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
        int thread = threadIdx.x % GROUP, lane = thread % 32, first = GROUP_ROWS * (group - 1);
        int line = thread / 32 * 16 + lane % 16;
        u32 stored = ring + STAGES * STAGE + (group - 1) * 2 * STORED;
        for (int i = blockIdx.x / 2; i < pairs * across; i += clusters) {
            Tile tile = tile_of(i, pairs, across, rank);
            float sums[OUTPUTS];  // gates, then ups, in the fragments of wgmma: 64 rows x 2 * OUTPUTS of 128 threads
            int before = 0;
            for (int k = 0; k < steps; ++k, next_stage()) {
                wait_for_bytes(full_at + 8 * stage, phase);
                u64 a = lines_at(ring + stage * STAGE + first * LINE), b = lines_at(ring + stage * STAGE + BOX);
                begin_multiplying();
#pragma unroll
                for (int j = 0; j < 4; ++j) multiply<T>(sums, a + 2 * j, b + 2 * j, k | j);
                close_multiplying();
                if (k) {  // a step multiplies on while the next one is awaited
                    wait_multiplied<1>();
                    if (thread < 2) arrive_in(empty_at + 8 * before, thread);
                }
                before = stage;
            }
            wait_multiplied<0>();
            if (thread < 2) arrive_in(empty_at + 8 * before, thread);
#pragma unroll
            for (int j = 0; j < OUTPUTS; ++j) asm volatile("" : "+f"(sums[j])::"memory");  // not read before the wait
            if (thread == 0) asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
            asm volatile("bar.sync %0, 128;" ::"r"(group) : "memory");
#pragma unroll
            for (int j = 0; j < OUTPUTS / 8; j += 2) {  // 16 outputs of 16 rows per warp
                u32 parts[4];
#pragma unroll
                for (int p = 0; p < 4; ++p) {
                    int c = 4 * (j + p / 2) + 2 * (p % 2);
                    float2 gate = T::rounded2(make_float2(sums[c], sums[c + 1]));
                    float2 up = T::rounded2(make_float2(sums[64 + c], sums[64 + c + 1]));
                    parts[p] = T::pack(make_float2(gated(gate.x, up.x), gated(gate.y, up.y)));
                }
                int part = j + lane / 16;  // 16 bytes, permuted as copy_box does
                store_matrices(stored + part / 8 * STORED + line * LINE + (part % 8 ^ line % 8) * 16, parts);
            }
            asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
            asm volatile("bar.sync %0, 128;" ::"r"(group) : "memory");
            if (thread == 0) {
                int row = tile.row + first;
                for (int j = 0; j < 2; ++j)
                    if (row < rows && tile.output + 64 * j < width)
                        store_box(out, tile.output + 64 * j, row, stored + j * STORED);
                asm volatile("cp.async.bulk.commit_group;" ::: "memory");
            }
        }
        if (thread == 0) asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
    }
    arrive_at_cluster();  // a block's memory is there until the other one has copied to it for the last time
    wait_for_cluster();
}

#endif
