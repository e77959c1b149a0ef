// The part of CUDA C++ that low-bit matmuls, experts and attention use, for a CPU. Threads are fibers: one runs until
// it waits for others, at a barrier or at an instruction of a whole warp. Reads are checked for alignment and bounds.
#pragma once
#include <immintrin.h>
#include <ucontext.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <utility>
#include <vector>

using std::max, std::min;

#define __CUDA_ARCH__ 900
#define __device__
#define __global__
#define __forceinline__ inline
#define __shared__ static
#define __launch_bounds__(...)
#define __align__(bytes) alignas(bytes)

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i64 = long long;

struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(8) uint2 { u32 x, y; };
struct alignas(16) uint4 { u32 x, y, z, w; };
struct alignas(16) int4 { int x, y, z, w; };
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint2 make_uint2(u32 x, u32 y) { return {x, y}; }
inline uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }

[[noreturn]] inline void fail(const char* what) {
    fprintf(stderr, "host kernel: %s\n", what);
    abort();
}

// Threads, blocks and clusters of up to two blocks.
struct Index { u32 x = 0, y = 0, z = 0; };
struct Fiber {
    ucontext_t context;
    std::vector<char> stack = std::vector<char>(1 << 16);
    Index thread;
    int block = 0;
    bool done = false;
};
struct Barrier {
    int arrived = 0;
    u32 generation = 0;
};
constexpr int MOST_BLOCKS = 2, MOST_WARPS = 32;
inline Fiber* current;
inline ucontext_t scheduler;
inline Index block_index, block_size, grid_size;
inline int blocks_of_cluster = 1;
inline std::vector<char> shared_memory[MOST_BLOCKS];
inline Barrier cluster_barrier, block_barriers[MOST_BLOCKS], warp_barriers[MOST_BLOCKS][MOST_WARPS];
inline std::function<void()> kernel;
#define threadIdx (current->thread)
#define blockIdx block_index
#define blockDim block_size
#define gridDim grid_size

inline char* shared_begin(int block) {
    auto at = reinterpret_cast<uintptr_t>(shared_memory[block].data());
    return reinterpret_cast<char*>((at + 127) / 128 * 128);
}

// Wait for `count` threads; the last one calls `last` before all go on.
template <class Last>
void meet(Barrier& barrier, int count, Last last) {
    u32 generation = barrier.generation;
    if (++barrier.arrived == count) {
        last();
        barrier.arrived = 0;
        ++barrier.generation;
    }
    while (barrier.generation == generation) swapcontext(&current->context, &scheduler);
}

inline void __syncthreads() {
    meet(block_barriers[current->block], block_size.x, [] {});
}
inline int cluster_size() { return blocks_of_cluster; }
inline int cluster_rank() { return current->block; }
inline void arrive_at_cluster() {}  // the kernels wait directly after it
inline void wait_for_cluster() {
    meet(cluster_barrier, block_size.x * blocks_of_cluster, [] {});
}
inline u32 __cvta_generic_to_shared(const void* at) {
    return static_cast<const char*>(at) - shared_begin(current->block);
}
inline u32 address_in(u32 address, int block) { return address | static_cast<u32>(block) << 24; }
inline float2 load_remote2(u32 address) {
    float2 x;
    memcpy(&x, shared_begin(address >> 24) + (address & 0xffffff), sizeof x);
    return x;
}
inline float4 load_remote4(u32 address) {
    float4 x;
    memcpy(&x, shared_begin(address >> 24) + (address & 0xffffff), sizeof x);
    return x;
}

// The values of all lanes of a warp, which meets.
template <class Value>
std::array<Value, 32> all_lanes(Value value) {
    static std::array<Value, 32> values[MOST_BLOCKS][MOST_WARPS];
    int warp = threadIdx.x / 32;
    auto& of_warp = values[current->block][warp];
    of_warp[threadIdx.x % 32] = value;
    meet(warp_barriers[current->block][warp], 32, [] {});
    auto all = of_warp;
    meet(warp_barriers[current->block][warp], 32, [] {});  // nothing is written before all have read
    return all;
}
template <class Value>
Value __shfl_sync(u32, Value value, int lane) {
    return all_lanes(value)[lane % 32];
}
template <class Value>
Value __shfl_xor_sync(u32, Value value, int distance) {
    return all_lanes(value)[threadIdx.x % 32 ^ distance];
}
template <class Value>
Value __shfl_up_sync(u32, Value value, u32 distance) {
    u32 lane = threadIdx.x % 32;
    return all_lanes(value)[lane < distance ? lane : lane - distance];
}
inline u32 __ballot_sync(u32, bool value) {
    u32 bits = 0, lane = 0;
    for (bool one : all_lanes(value)) bits |= u32(one) << lane++;
    return bits;
}
inline int __reduce_add_sync(u32, int value) {
    int sum = 0;
    for (int each : all_lanes(value)) sum += each;
    return sum;
}
inline u32 __reduce_max_sync(u32, u32 value) {
    for (u32 each : all_lanes(value)) value = std::max(value, each);
    return value;
}
inline u32 __reduce_min_sync(u32, u32 value) {
    for (u32 each : all_lanes(value)) value = std::min(value, each);
    return value;
}
inline bool __all_sync(u32, bool value) { return __ballot_sync(~0u, value) == ~0u; }
inline int __popc(u32 bits) { return __builtin_popcount(bits); }
inline bool __any_sync(u32, bool value) { return __ballot_sync(~0u, value) != 0; }
inline void __syncwarp() { __ballot_sync(~0u, true); }
inline void __threadfence() {}
inline int atomicAdd(int* to, int added) { return (*to += added) - added; }
inline u32 atomicOr(u32* to, u32 bits) { return std::exchange(*to, *to | bits); }

inline void run_fiber() {
    kernel();
    current->done = true;
    swapcontext(&current->context, &scheduler);
}

// Run `body` by `threads` threads of each of `grid` clusters.
inline void launch(Index grid, int blocks, int threads, size_t shared, std::function<void()> body) {
    kernel = body, blocks_of_cluster = blocks, block_size = {static_cast<u32>(threads), 1}, grid_size = grid;
    for (u32 i = 0; i < grid.x * grid.y * max(grid.z, 1u); ++i) {
        block_index = {i % grid.x, i / grid.x % grid.y, i / grid.x / grid.y};
        for (auto& each : shared_memory) each.assign(shared + 128, 0x7f);
        std::vector<Fiber> fibers(blocks * threads);
        for (size_t j = 0; j < fibers.size(); ++j) {
            Fiber& fiber = fibers[j];
            fiber.thread.x = j % threads, fiber.block = j / threads;
            getcontext(&fiber.context);
            fiber.context.uc_stack.ss_sp = fiber.stack.data(), fiber.context.uc_stack.ss_size = fiber.stack.size();
            makecontext(&fiber.context, run_fiber, 0);
        }
        for (bool left = true; left;) {
            left = false;
            for (Fiber& fiber : fibers) {
                if (fiber.done) continue;
                left = true, current = &fiber;
                swapcontext(&scheduler, &fiber.context);
            }
        }
    }
}

// Memory that kernels may read.
inline std::vector<std::pair<const char*, const char*>> readable;
template <class T>
T __ldg(const T* at) {
    auto* begin = reinterpret_cast<const char*>(at);
    if (reinterpret_cast<uintptr_t>(at) % sizeof(T)) fail("a read is not aligned");
    for (auto& [from, until] : readable)
        if (begin >= from && begin + sizeof(T) <= until) return *at;
    fail("a read is out of bounds");
}

template <class T>
T __ldcg(const T* at) {
    return *at;
}
inline const void* __cvta_generic_to_global(const void* at) { return at; }

// Numbers.
inline float __uint_as_float(u32 bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}
inline float __int_as_float(int bits) { return __uint_as_float(bits); }
inline u32 __float_as_uint(float x) {
    u32 bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}
inline u32 __byte_perm(u32 a, u32 b, u32 selector) {
    u64 bytes = static_cast<u64>(b) << 32 | a;
    u32 made = 0;
    for (int i = 0; i < 4; ++i) made |= static_cast<u32>(bytes >> 8 * (selector >> 4 * i & 7) & 255) << 8 * i;
    return made;
}
inline u32 __funnelshift_r(u32 low, u32 high, u32 shift) {
    return static_cast<u32>((static_cast<u64>(high) << 32 | low) >> (shift & 31));
}
inline float __expf(float x) { return expf(x); }
inline float __fdividef(float x, float y) { return x / y; }
inline float __fmaf_rn(float x, float y, float z) { return fmaf(x, y, z); }
inline float __fmul_rn(float x, float y) { return x * y; }
inline float __frcp_rn(float x) { return 1 / x; }
inline float rsqrtf(float x) { return 1 / sqrtf(x); }
inline int __ffs(u32 bits) { return __builtin_ffs(bits); }
inline float from_bf16(u32 bits) { return __uint_as_float(bits << 16); }
inline float from_fp16(u32 bits) { return _cvtsh_ss(static_cast<u16>(bits)); }
inline u32 to_bf16(float x) {
    u32 bits = __float_as_uint(x);
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16 & 0xffff;
}
inline u32 to_fp16(float x) { return _cvtss_sh(x, 0); }
template <class Value>
u32 halves(Value value) {
    return value(0) | value(16) << 16;
}

// Instructions, by their names in PTX. Products of 16-bit numbers and the sums of some are exact in float64.
inline void ptx_lop3_b32(u32& made, u32 a, u32 b, u32 c) { made = a & b | c; }
inline void ptx_fma_rn_bf16x2(u32& made, u32 a, u32 b, u32 c) {
    made = halves(
        [&](int i) { return to_bf16(static_cast<double>(from_bf16(a >> i)) * from_bf16(b >> i) + from_bf16(c >> i)); });
}
inline void ptx_add_rn_f16x2(u32& made, u32 a, u32 b) {
    made = halves([&](int i) { return to_fp16(from_fp16(a >> i) + from_fp16(b >> i)); });
}
inline void ptx_mul_rn_f16x2(u32& made, u32 a, u32 b) {
    made = halves([&](int i) { return to_fp16(from_fp16(a >> i) * from_fp16(b >> i)); });
}
inline void ptx_cvt_rn_bf16x2_f32(u32& made, float high, float low) { made = to_bf16(low) | to_bf16(high) << 16; }
inline void ptx_cvt_rn_f16x2_f32(u32& made, float high, float low) { made = to_fp16(low) | to_fp16(high) << 16; }
inline void ptx_cvt_f32_f16(float& made, u16 bits) { made = from_fp16(bits); }
inline void ptx_ld_global(u32& x, u32& y, u32& z, u32& w, const void* at) {
    uint4 four = __ldg(static_cast<const uint4*>(at));
    x = four.x, y = four.y, z = four.z, w = four.w;
}

inline void ptx_cp_async_cg_shared_global_L2__128B(u32 address, const void* from, int size) {
    uint4 copied = size ? __ldg(static_cast<const uint4*>(from)) : uint4{};
    memcpy(shared_begin(current->block) + address, &copied, sizeof copied);
}
inline void ptx_ld_relaxed_gpu_global_u32(u32& x, const u32* at) { x = __ldg(at); }
inline void ptx_ld_relaxed_gpu_global_v4_u32(u32& x, u32& y, u32& z, u32& w, const void* at) {
    ptx_ld_global(x, y, z, w, at);
}
inline void ptx_prefetch_global_L2(const void*) {}
inline void ptx_griddepcontrol_launch_dependents() {}
inline void ptx_griddepcontrol_wait() {}

// Four matrices of 8 x 8; lane l gives the address of row l % 8 of matrix l / 8, and gets two numbers of each.
template <bool TRANSPOSED>
void load_four(u32& to0, u32& to1, u32& to2, u32& to3, u32 address) {
    auto addresses = all_lanes(address);
    u32* to[4] = {&to0, &to1, &to2, &to3};
    int lane = threadIdx.x % 32;
    for (int i = 0; i < 4; ++i) {
        u16 two[2];
        for (int j = 0; j < 2; ++j) {
            int row = TRANSPOSED ? lane % 4 * 2 + j : lane / 4, column = TRANSPOSED ? lane / 4 : lane % 4 * 2 + j;
            memcpy(two + j, shared_begin(current->block) + addresses[8 * i + row] + 2 * column, 2);
        }
        memcpy(to[i], two, 4);
    }
}
#define ptx_ldmatrix_sync_aligned_m8n8_x4_shared_b16 ::load_four<false>
#define ptx_ldmatrix_sync_aligned_m8n8_x4_trans_shared_b16 ::load_four<true>

inline void ptx_cp_async_commit_group() {}  // a copy is made at once
inline void ptx_cp_async_wait_group(int) {}

// c[16 x 8] += a[16 x 16] b[16 x 8] of a warp; the fragments are those of mma.m16n8k16 in the PTX manual.
struct Fragments {
    u32 a[4], b[2];
    float* c[4];
};
inline Fragments all_fragments[MOST_BLOCKS][MOST_WARPS][32];
template <float (*number)(u32)>
void multiply_tile(float& c0, float& c1, float& c2, float& c3, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    int warp = threadIdx.x / 32;
    auto& fragments = all_fragments[current->block][warp];
    fragments[threadIdx.x % 32] = {{a0, a1, a2, a3}, {b0, b1}, {&c0, &c1, &c2, &c3}};
    meet(warp_barriers[current->block][warp], 32, [&] {
        float a[16][16], b[16][8];
        for (int lane = 0; lane < 32; ++lane)
            for (int i = 0; i < 8; ++i) {
                int k = lane % 4 * 2 + i % 2 + i / 4 * 8;
                a[lane / 4 + i / 2 % 2 * 8][k] = number(fragments[lane].a[i / 2] >> 16 * (i % 2));
                if (i / 2 % 2 == 0) b[k][lane / 4] = number(fragments[lane].b[i / 4] >> 16 * (i % 2));
            }
        for (int lane = 0; lane < 32; ++lane)
            for (int i = 0; i < 4; ++i) {
                float& c = *fragments[lane].c[i];
                double sum = c;
                for (int k = 0; k < 16; ++k)
                    sum += static_cast<double>(a[lane / 4 + i / 2 * 8][k]) * b[k][lane % 4 * 2 + i % 2];
                c = sum;
            }
    });
}
#define ptx_mma_bf16 ::multiply_tile<::from_bf16>
#define ptx_mma_f16 ::multiply_tile<::from_fp16>
