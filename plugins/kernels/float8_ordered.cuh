// The matmul of a few rows in float8 that adds inputs as cuBLASLt's algorithms without split-K do on Hopper: tensor
// cores sum 128 inputs, and these sums are added in float32, in order. So a row's result does not depend on the number
// of rows (linear.py tries it).
#pragma once
#include "bulk_copy.cuh"
#include "copy.cuh"
#include "early.cuh"
#include "experts_elements.cuh"
#include "float8.cuh"
#include "warpgroup.cuh"

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

constexpr int GROUP_OUTPUTS = 16;
constexpr int CHUNK = 128;     // inputs that tensor cores sum, and bytes of a line in shared memory
constexpr int CHUNKS = 4;      // of a round, one per warp of a warpgroup
constexpr int WINDOW = 4;      // rounds
constexpr int MOST_SLOTS = 8;  // windows of the rows in shared memory
constexpr int WARP_STAGE = GROUP_OUTPUTS * CHUNK;

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
// Keep the compiler from moving, before the last wait, a read of results or another use of the operands' registers.
template <int SUMS, int STEPS>
__device__ __forceinline__ void done_multiplying(float (&sums)[SUMS], u32 (&outputs)[STEPS][4]) {
#pragma unroll
    for (int i = 0; i < SUMS; ++i) asm volatile("" : "+f"(sums[i])::"memory");
#pragma unroll
    for (int i = 0; i < STEPS * 4; ++i) asm volatile("" : "+r"(outputs[i / 4][i % 4])::"memory");
}

// A block of warpgroups, each with 16 outputs of all rows, at most 8 * TILES, and then with those of the next set. In a
// round every warp of a group sums another chunk of inputs: a multiplication has the rows' four chunks as columns, and
// a warp uses those of its own. After each window of rounds the group adds the sums of its chunks in order. The weight
// is read ahead by STAGES - 1 rounds, beyond a set's end, and before the previous kernel has written the rows. `slots`
// windows of the rows are in shared memory: all of them, or the next ones.
template <class T, int TILES, int STAGES>
__device__ void few_ordered(const void* row_boxes, const float* scales, const u8* weight, const float* weight_scales,
                            int rows, int width, int inner, int slots, typename T::Element* out) {
    constexpr int BOX = TILES * 8 * CHUNK, ROW_WINDOW = WINDOW * CHUNKS * BOX, SUMS = CHUNKS * TILES * 4;
    constexpr int STEPS = CHUNK / 32;  // multiplications of a chunk
    // [slots][ROW_WINDOW], [warps][STAGES][WARP_STAGE], float [groups][2][WINDOW * CHUNKS][TILES][GROUP]
    extern __shared__ __align__(1024) unsigned char memory[];
    __shared__ u64 barriers[MOST_SLOTS];
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = warp / CHUNKS, groups = blockDim.x / GROUP;
    int sets = (width + GROUP_OUTPUTS * groups - 1) / (GROUP_OUTPUTS * groups);
    int windows = (inner + WINDOW * CHUNKS * CHUNK - 1) / (WINDOW * CHUNKS * CHUNK);
    u32 row_ring = shared_address(memory), barrier = shared_address(barriers);
    u32 ring = row_ring + slots * ROW_WINDOW + warp * STAGES * WARP_STAGE;
    auto* partial = reinterpret_cast<float*>(memory + slots * ROW_WINDOW + CHUNKS * groups * STAGES * WARP_STAGE);
    partial += group * 2 * WINDOW * CHUNKS * TILES * GROUP;

    if (threadIdx.x == 0) prefetch_boxes(row_boxes);
    int begin = warp % CHUNKS * CHUNK + lane % 8 * 16, k = begin, next_set = blockIdx.x, next_stage = 0;
    auto copy_next = [&] {
        if (next_set < sets) {
            int output = (next_set * groups + group) * GROUP_OUTPUTS + lane / 8;
            const u8* from = weight + static_cast<i64>(output) * inner + k;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                int line = lane / 8 + 4 * i;
                u32 to = ring + next_stage * WARP_STAGE + line * CHUNK + ((lane % 8) ^ (line % 8)) * 16;
                bool there = output + 4 * i < width && k < inner;
                copy16(to, there ? from + static_cast<i64>(4 * i) * inner : weight, there);
            }
        }
        close_copies();
        k += CHUNKS * CHUNK;
        if (k >= windows * WINDOW * CHUNKS * CHUNK) k = begin, next_set += gridDim.x;
        next_stage = next_stage + 1 == STAGES ? 0 : next_stage + 1;
    };
#pragma unroll 1
    for (int i = 0; i < STAGES - 1; ++i) copy_next();
    if (threadIdx.x < slots) create_barrier(barrier + 8 * threadIdx.x);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    __syncthreads();
    begin_next();
    wait_for_previous();

    bool all_there = slots >= windows;
    auto copy_rows = [&](int slot, int window) {
        u32 done = barrier + slot * 8;
        if (threadIdx.x == 0) announce_bytes(done, ROW_WINDOW);
        if (lane) return;
        for (int i = warp; i < WINDOW * CHUNKS; i += groups * CHUNKS)
            copy_box(row_ring + slot * ROW_WINDOW + i * BOX, row_boxes, (window * WINDOW * CHUNKS + i) * CHUNK, 0,
                     done);
    };
#pragma unroll 1
    for (int i = 0; i < min(slots, windows); ++i) copy_rows(i, i);

    int stage = 0, slot = 0, phase = 0, half = 0;
    int block = blockIdx.x, blocks = gridDim.x;
    int left = (sets - block + blocks - 1) / blocks * windows - slots;  // windows of rows that are not copied yet
    auto begin_round = [&](int round, float (&sums)[SUMS], u32(&outputs)[STEPS][4]) {
        wait_copies<STAGES - 2>();
        __syncwarp();
        copy_next();
        u32 line = ring + stage * WARP_STAGE + lane % 16 * CHUNK;
#pragma unroll
        for (int i = 0; i < STEPS; ++i) load_matrices(outputs[i], line + ((2 * i + lane / 16) ^ (lane % 8)) * 16);
        stage = stage + 1 == STAGES ? 0 : stage + 1;
        u64 columns = lines_at(row_ring + slot * ROW_WINDOW + round * CHUNKS * BOX);
        begin_multiplying();
#pragma unroll
        for (int i = 0; i < STEPS; ++i) multiply(sums, outputs[i], columns + 2 * i, i != 0);
        close_multiplying();
    };
    auto store_sums = [&](int round, float (&sums)[SUMS], u32(&outputs)[STEPS][4]) {
        done_multiplying(sums, outputs);
        float* to = partial + ((half * WINDOW + round) * CHUNKS + warp % CHUNKS) * TILES * GROUP + lane * 2;
#pragma unroll
        for (int chunk = 0; chunk < CHUNKS; ++chunk) {
            if (warp % CHUNKS != chunk) continue;
#pragma unroll
            for (int t = 0; t < TILES; ++t)
#pragma unroll
                for (int j = 0; j < 2; ++j) {
                    int i = (chunk * TILES + t) * 4 + 2 * j;
                    *reinterpret_cast<float2*>(to + t * GROUP + j * 64) = make_float2(sums[i], sums[i + 1]);
                }
        }
    };
#pragma unroll 1
    for (int set = blockIdx.x; set < sets; set += gridDim.x) {
        float total[TILES] = {};
#pragma unroll 1
        for (int window = 0; window < windows; ++window) {
            wait_for_bytes(barrier + slot * 8, phase);
            // Two rounds in turns: one is stored while the other is multiplied.
            float sums[2][SUMS];
            u32 outputs[2][STEPS][4];
            begin_round(0, sums[0], outputs[0]);
#pragma unroll
            for (int round = 1; round < WINDOW; ++round) {
                begin_round(round, sums[round % 2], outputs[round % 2]);
                wait_multiplied<1>();
                store_sums(round - 1, sums[(round - 1) % 2], outputs[(round - 1) % 2]);
            }
            wait_multiplied<0>();
            store_sums(WINDOW - 1, sums[(WINDOW - 1) % 2], outputs[(WINDOW - 1) % 2]);
            // The sums of two windows have room: those of one are added while others store the next ones.
            if (all_there) {
                asm volatile("bar.sync %0, 128;" ::"r"(group + 1) : "memory");
                slot = slot + 1 == windows ? 0 : slot + 1;
            } else {
                __syncthreads();  // all warps are done with the rows that the next ones replace
                if (left-- > 0) copy_rows(slot, (window + slots) % windows);
                if (++slot == slots) slot = 0, phase ^= 1;
            }
#pragma unroll
            for (int i = 0; i < WINDOW * CHUNKS; ++i)
#pragma unroll
                for (int t = 0; t < TILES; ++t)
                    total[t] += partial[((half * WINDOW * CHUNKS + i) * TILES + t) * GROUP + threadIdx.x % GROUP];
            half ^= 1;
        }
        int output = (set * groups + group) * GROUP_OUTPUTS + threadIdx.x % GROUP / 8;
#pragma unroll
        for (int t = 0; t < TILES; ++t) {
            int row = 8 * t + threadIdx.x % 8;
            if (row >= rows || output >= width) continue;
            float sum = total[t];
            if (scales) sum = rounded<T>(sum) * (scales[row] * weight_scales[output]);  // as if scale_matmul followed
            store1<T>(out + static_cast<i64>(row) * width + output, sum);
        }
    }
    wait_copies<0>();
}

#endif
