// The matmul of a few rows in float8 that adds inputs as cuBLASLt's algorithms without split-K do on Hopper: tensor cores
// sum 128 inputs, and these sums are added in float32, in order. So a row's result does not depend on the number of
// rows (linear.py tries it).
#pragma once
#include "bulk_copy.cuh"
#include "copy.cuh"
#include "early.cuh"
#include "experts_elements.cuh"
#include "float8.cuh"

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

constexpr int GROUP = 128;  // threads of a warpgroup
constexpr int GROUP_OUTPUTS = 16;
constexpr int CHUNK = 128;  // inputs that tensor cores sum, and bytes of a line in shared memory
constexpr int CHUNKS = 4;  // of a round, one per warp of a warpgroup
constexpr int WARP_STAGE = GROUP_OUTPUTS * CHUNK;

// Copy a box of a tensor, from column `column` of the first row on, with its 16-byte parts permuted (128-byte swizzle).
__device__ __forceinline__ void copy_box(u32 to, const void* tensor, int column, u32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(to),
        "l"(tensor), "r"(column), "r"(0), "r"(barrier)
        : "memory");
}

__device__ __forceinline__ void prefetch_boxes(const void* tensor) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(tensor) : "memory");
}

// Lines of 128 bytes, permuted as above, eight of them per 1,024 bytes.
__device__ __forceinline__ u64 lines_at(u32 address) {
    return u64(1) << 62 | u64(8 * CHUNK / 16) << 32 | u64(1) << 16 | (address & 0x3ffff) / 16;
}

// c[16 outputs of each warp x columns] = a[outputs x 32] b[columns x 32].T, added to c if `add`. Asynchronous.
__device__ __forceinline__ void multiply(float (&c)[16], const u32 (&a)[4], u64 b, int add) {
    asm volatile(
        "{ .reg .pred add;\nsetp.ne.b32 add, %21, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n32k32.f32.e4m3.e4m3 "
        "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}, {%16,%17,%18,%19}, %20, add, 1, 1; }"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]), "+f"(c[7]), "+f"(c[8]),
          "+f"(c[9]), "+f"(c[10]), "+f"(c[11]), "+f"(c[12]), "+f"(c[13]), "+f"(c[14]), "+f"(c[15])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
}
__device__ __forceinline__ void multiply(float (&c)[32], const u32 (&a)[4], u64 b, int add) {
    asm volatile(
        "{ .reg .pred add;\nsetp.ne.b32 add, %37, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 "
        "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,"
        "%29,%30,%31}, {%32,%33,%34,%35}, %36, add, 1, 1; }"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]), "+f"(c[7]), "+f"(c[8]),
          "+f"(c[9]), "+f"(c[10]), "+f"(c[11]), "+f"(c[12]), "+f"(c[13]), "+f"(c[14]), "+f"(c[15]), "+f"(c[16]),
          "+f"(c[17]), "+f"(c[18]), "+f"(c[19]), "+f"(c[20]), "+f"(c[21]), "+f"(c[22]), "+f"(c[23]), "+f"(c[24]),
          "+f"(c[25]), "+f"(c[26]), "+f"(c[27]), "+f"(c[28]), "+f"(c[29]), "+f"(c[30]), "+f"(c[31])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
}
__device__ __forceinline__ void begin_multiplying() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void close_multiplying() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Wait until at most N groups of multiplications are in flight.
template <int N>
__device__ __forceinline__ void wait_multiplied() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}

// Keep the compiler from moving, before the last wait, a read of results or another use of the operands' registers.
template <int SUMS, int STEPS>
__device__ __forceinline__ void done_multiplying(float (&sums)[SUMS], u32 (&outputs)[STEPS][4]) {
#pragma unroll
    for (int i = 0; i < SUMS; ++i) asm volatile("" : "+f"(sums[i])::"memory");
#pragma unroll
    for (int i = 0; i < STEPS * 4; ++i) asm volatile("" : "+r"(outputs[i / 4][i % 4])::"memory");
}

// A block of one or two warpgroups, each with 16 outputs of all rows, at most 8 * TILES. In a round every warp of a
// group sums another chunk of inputs: a multiplication has the rows' four chunks as columns, and a warp uses those of
// its own. Then the group adds the four sums in order. The weight is read ahead, by STAGES - 1 rounds, before the
// previous kernel has written the rows; these by ROW_STAGES rounds.
template <class T, int TILES, int STAGES>
__device__ void few_ordered(
    const void* row_boxes, const float* scales, const u8* weight, const float* weight_scales, int rows, int width,
    int inner, typename T::Element* out
) {
    constexpr int ROW_STAGES = 4, ROW_STAGE = CHUNKS * TILES * 8 * CHUNK, SUMS = CHUNKS * TILES * 4;
    constexpr int STEPS = CHUNK / 32;  // multiplications of a chunk
    // [ROW_STAGES][ROW_STAGE], [warps][STAGES][WARP_STAGE], float [2][groups][CHUNKS][TILES][GROUP]
    extern __shared__ __align__(1024) unsigned char memory[];
    __shared__ u64 barriers[ROW_STAGES];
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = warp / CHUNKS, groups = blockDim.x / GROUP;
    int first = GROUP_OUTPUTS * (blockIdx.x * groups + group), rounds = (inner + CHUNKS * CHUNK - 1) / (CHUNKS * CHUNK);
    u32 row_ring = shared_address(memory), barrier = shared_address(barriers);
    u32 ring = row_ring + ROW_STAGES * ROW_STAGE + warp * STAGES * WARP_STAGE;
    auto* partial = reinterpret_cast<float*>(memory + ROW_STAGES * ROW_STAGE + CHUNKS * groups * STAGES * WARP_STAGE);

    if (threadIdx.x == 0) prefetch_boxes(row_boxes);
    int k = warp % CHUNKS * CHUNK + lane % 8 * 16, next_slot = 0;
    const u8* from[4];
    bool there[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        int output = first + lane / 8 + 4 * i;
        there[i] = output < width;
        from[i] = weight + static_cast<i64>(there[i] ? output : 0) * inner;
    }
    auto copy_next = [&] {
        if (k < rounds * CHUNKS * CHUNK) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                int line = lane / 8 + 4 * i;
                u32 to = ring + next_slot * WARP_STAGE + line * CHUNK + ((lane % 8) ^ (line % 8)) * 16;
                copy16(to, from[i] + (k < inner ? k : 0), there[i] && k < inner);
            }
        }
        close_copies();
        k += CHUNKS * CHUNK;
        next_slot = next_slot + 1 == STAGES ? 0 : next_slot + 1;
    };
#pragma unroll 1
    for (int i = 0; i < STAGES - 1; ++i) copy_next();
    if (threadIdx.x < ROW_STAGES) create_barrier(barrier + 8 * threadIdx.x);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    begin_next();
    wait_for_previous();
    __syncthreads();

    auto copy_rows = [&](int round) {
        if (threadIdx.x || round >= rounds) return;
        u32 done = barrier + round % ROW_STAGES * 8;
        announce_bytes(done, ROW_STAGE);
#pragma unroll
        for (int i = 0; i < CHUNKS; ++i) {
            u32 to = row_ring + round % ROW_STAGES * ROW_STAGE + i * TILES * 8 * CHUNK;
            copy_box(to, row_boxes, (round * CHUNKS + i) * CHUNK, done);
        }
    };
#pragma unroll 1
    for (int i = 0; i < ROW_STAGES; ++i) copy_rows(i);

    float total[TILES] = {};
    auto partial_of = [&](int round, int chunk) {
        return partial + ((round % 2 * groups + group) * CHUNKS + chunk) * TILES * GROUP;
    };
    auto add = [&](int round) {
#pragma unroll
        for (int chunk = 0; chunk < CHUNKS; ++chunk)
#pragma unroll
            for (int t = 0; t < TILES; ++t) total[t] += partial_of(round, chunk)[t * GROUP + threadIdx.x % GROUP];
    };
    int slot = 0;
    auto begin_round = [&](int round, float (&sums)[SUMS], u32 (&outputs)[STEPS][4]) {
        if (round) __syncthreads();  // all warps have stored the sums of two rounds before, and are done with its rows
        if (round > 1) copy_rows(round - 2 + ROW_STAGES);
        wait_copies<STAGES - 2>();
        __syncwarp();
        copy_next();
        u32 line = ring + slot * WARP_STAGE + lane % 16 * CHUNK;
#pragma unroll
        for (int i = 0; i < STEPS; ++i) load_matrices(outputs[i], line + ((2 * i + lane / 16) ^ (lane % 8)) * 16);
        slot = slot + 1 == STAGES ? 0 : slot + 1;
        wait_for_bytes(barrier + round % ROW_STAGES * 8, round / ROW_STAGES % 2);
        u64 columns = lines_at(row_ring + round % ROW_STAGES * ROW_STAGE);
        begin_multiplying();
#pragma unroll
        for (int i = 0; i < STEPS; ++i) multiply(sums, outputs[i], columns + 2 * i, i != 0);
        close_multiplying();
        if (round > 1) add(round - 2);
    };
    auto store_sums = [&](int round, float (&sums)[SUMS], u32 (&outputs)[STEPS][4]) {
        done_multiplying(sums, outputs);
#pragma unroll
        for (int chunk = 0; chunk < CHUNKS; ++chunk) {
            if (warp % CHUNKS != chunk) continue;
#pragma unroll
            for (int t = 0; t < TILES; ++t)
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    int i = (chunk * TILES + t) * 4 + 2 * half;
                    float* to = partial_of(round, chunk) + t * GROUP + (lane / 4 + 8 * half) * 8 + 2 * (lane % 4);
                    *reinterpret_cast<float2*>(to) = make_float2(sums[i], sums[i + 1]);
                }
        }
    };
    auto finish = [&](float (&sums)[SUMS], u32 (&outputs)[STEPS][4]) {
        wait_multiplied<0>();
        __syncthreads();  // the last sums replace those of two rounds before
        if (rounds > 1) add(rounds - 2);
        store_sums(rounds - 1, sums, outputs);
        __syncthreads();
        add(rounds - 1);
    };
    // Two rounds in turns: one is stored while the other is multiplied.
    float even[SUMS], odd[SUMS];
    u32 even_outputs[STEPS][4], odd_outputs[STEPS][4];
    begin_round(0, even, even_outputs);
    int round = 1;
#pragma unroll 1
    for (; round + 1 < rounds; round += 2) {
        begin_round(round, odd, odd_outputs);
        wait_multiplied<1>();
        store_sums(round - 1, even, even_outputs);
        begin_round(round + 1, even, even_outputs);
        wait_multiplied<1>();
        store_sums(round, odd, odd_outputs);
    }
    if (round < rounds) {
        begin_round(round, odd, odd_outputs);
        wait_multiplied<1>();
        store_sums(round - 1, even, even_outputs);
        finish(odd, odd_outputs);
    } else {
        finish(even, even_outputs);
    }

    int output = first + threadIdx.x % GROUP / 8;
#pragma unroll
    for (int t = 0; t < TILES; ++t) {
        int row = 8 * t + threadIdx.x % 8;
        if (row >= rows || output >= width) continue;
        float sum = total[t];
        if (scales) sum = rounded<T>(sum) * (scales[row] * weight_scales[output]);  // as if scale_matmul followed
        store1<T>(out + static_cast<i64>(row) * width + output, sum);
    }
}

#endif
