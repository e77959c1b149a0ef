// Operators that all ranks of a tensor-parallel target run together, over memory of all GPUs that each of them maps.
//
// Every rank has one block of memory: counters and flags, two slots for parts, lines, and the inputs of a call. A rank
// copies its part into its slot, raises a flag in the memory of every rank, waits for the flags of all, and reads the
// slots of all in the order of the ranks. So all ranks get the same bits, and an element's bits depend on no other one.
//
// A small part goes as lines instead: 8 bytes of it and a flag in each half of 16 bytes, stored in the memory of every
// other rank. A half is stored at once, so its flag says that its data are there, without a fence or a second way back.
//
// Calls alternate between the slots. A rank that writes slot s in call n has waited for all flags of call n - 1, which
// a rank raises after it has ended call n - 2, the last one that read slot s; for lines, their flags say the same.
// Thread block b of a rank only reads what thread blocks b of the others wrote, so a block waits for those alone.

#include "early.cuh"
#include "variants.cuh"

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define MAX_RANKS 8
#define MAX_BLOCKS 128
#define COMMANDS 512  // byte offsets in a rank's memory: counters of this kind, after those of parts
#define FLAGS 1024    // two stages of parts, by rank and thread block
#define COMMAND_FLAGS 9216
#define SLOTS 16384  // then two slots of `most` bytes, two times `count` parts of `lines` bytes, inputs

struct Ranks {
    const u64* memory;  // addresses of the memory of all ranks
    int rank, count;
    const int* aborted;  // in host memory: not 0 when a rank has failed
    long long most, lines;

    __device__ char* of(int rank) const { return reinterpret_cast<char*>(memory[rank]); }
    __device__ u32* counter(int kind) const { return reinterpret_cast<u32*>(of(rank) + kind) + blockIdx.x; }
    __device__ u32* flag(int at, int stage, int from) const {
        return reinterpret_cast<u32*>(of(at) + FLAGS) + (stage * MAX_RANKS + from) * MAX_BLOCKS + blockIdx.x;
    }
    __device__ u32* command_flag(int at) const { return reinterpret_cast<u32*>(of(at) + COMMAND_FLAGS) + blockIdx.x; }
    __device__ char* slot(int of_rank, u32 call) const { return of(of_rank) + SLOTS + (call & 1) * most; }
    __device__ uint4* lines_of(int of_rank, u32 call, int from) const {
        return reinterpret_cast<uint4*>(of(of_rank) + SLOTS + 2 * most + ((call & 1) * count + from) * lines);
    }
    __device__ char* inputs(int of_rank) const { return of(of_rank) + SLOTS + 2 * most + 2 * count * lines; }
};

__device__ __forceinline__ void raise_flag(u32* flag, u32 call) {
    __threadfence_system();
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(flag), "r"(call) : "memory");
}

__device__ __forceinline__ void wait_for_flag(const u32* flag, u32 call, const int* aborted) {
    for (u32 polls = 1;; ++polls) {
        u32 seen;
        asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(seen) : "l"(flag) : "memory");
        if (static_cast<int>(seen - call) >= 0) return;
        if (polls % 1024 == 0 && *reinterpret_cast<const volatile int*>(aborted)) return;
    }
}

// Wait until thread block blockIdx.x of every rank is here, with all that it wrote before.
__device__ __forceinline__ void meet(const Ranks& ranks, int stage, u32 call) {
    __syncthreads();
    if (threadIdx.x < ranks.count) {
        raise_flag(ranks.flag(threadIdx.x, stage, ranks.rank), call);
        wait_for_flag(ranks.flag(ranks.rank, stage, threadIdx.x), call, ranks.aborted);
    }
    __syncthreads();
}

__device__ __forceinline__ u32 begin_call(const Ranks& ranks, int kind) { return *ranks.counter(kind) + 1; }

// Count the call for all thread blocks, also for those that it does not have.
__device__ __forceinline__ void end_call(const Ranks& ranks, int kind, u32 call) {
    __syncthreads();
    if (threadIdx.x == 0) *ranks.counter(kind) = call;
    if (blockIdx.x == 0 && threadIdx.x >= gridDim.x && threadIdx.x < MAX_BLOCKS) {
        ranks.counter(kind)[threadIdx.x] = call;
    }
}

__device__ __forceinline__ uint4 load(const void* from) {  // not from a cache that another GPU does not update
    uint4 v;
    asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(from)
                 : "memory");
    return v;
}

__device__ __forceinline__ void store_line(uint4* line, uint2 data, u32 flag) {
    asm volatile("st.volatile.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(line), "r"(data.x), "r"(flag), "r"(data.y),
                 "r"(flag)
                 : "memory");
}

// All threads wait here: if they read host memory after fewer polls, 512 us would pass for 1,024 warps.
__device__ __forceinline__ uint2 wait_for_line(const uint4* line, u32 flag, const int* aborted) {
    for (u32 polls = 1;; ++polls) {
        uint4 seen = load(line);
        bool ended = polls % (1 << 20) == 0 && *reinterpret_cast<const volatile int*>(aborted);
        if ((seen.y == flag && seen.w == flag) || ended) return make_uint2(seen.x, seen.z);
    }
}

struct BFloat16 {
    static constexpr int pairs = 2;
    static __device__ __forceinline__ float wide(u32 word, int half) {
        return __uint_as_float(half ? word & 0xffff0000u : word << 16);
    }
    static __device__ __forceinline__ u32 narrow(const float* values) {
        u32 word;
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(values[1]), "f"(values[0]));
        return word;
    }
};

struct Float16 {
    static constexpr int pairs = 2;
    static __device__ __forceinline__ float wide(u32 word, int half) {
        float value;
        u16 bits = static_cast<u16>(half ? word >> 16 : word);
        asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
        return value;
    }
    static __device__ __forceinline__ u32 narrow(const float* values) {
        u32 word;
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(values[1]), "f"(values[0]));
        return word;
    }
};

struct Float32 {
    static constexpr int pairs = 1;
    static __device__ __forceinline__ float wide(u32 word, int) { return __uint_as_float(word); }
    static __device__ __forceinline__ u32 narrow(const float* values) { return __float_as_uint(values[0]); }
};

template <class Type, int COUNT>
__device__ __forceinline__ u32 add(const u32 (&words)[COUNT]) {
    float total[Type::pairs];
#pragma unroll
    for (int half = 0; half < Type::pairs; ++half) {
        total[half] = Type::wide(words[0], half);
#pragma unroll
        for (int rank = 1; rank < COUNT; ++rank) total[half] += Type::wide(words[rank], half);
    }
    return Type::narrow(total);
}

template <class Type, int COUNT>
__device__ __forceinline__ uint4 sum_at(const Ranks& ranks, u32 call, long long at) {
    u32 words[4][COUNT];
#pragma unroll
    for (int rank = 0; rank < COUNT; ++rank) {
        uint4 part = load(ranks.slot(rank, call) + 16 * at);
        words[0][rank] = part.x, words[1][rank] = part.y, words[2][rank] = part.z, words[3][rank] = part.w;
    }
    return make_uint4(add<Type>(words[0]), add<Type>(words[1]), add<Type>(words[2]), add<Type>(words[3]));
}

// By lines: every rank adds all elements, as soon as they are here.
template <class Type, int COUNT>
__device__ void reduce_lines(const Ranks& ranks, u32 call, const uint2* x, long long lines, uint2* sum) {
    u32 flag = 2 * call + 1;  // never that of memory without lines, 0
    long long first = blockIdx.x * blockDim.x + threadIdx.x, step = gridDim.x * blockDim.x;
    for (long long at = first; at < lines; at += step) {
        uint2 own = x[at];
#pragma unroll
        for (int rank = 0; rank < COUNT; ++rank) {
            if (rank != ranks.rank) store_line(ranks.lines_of(rank, call, ranks.rank) + at, own, flag);
        }
    }
    for (long long at = first; at < lines; at += step) {
        u32 low[COUNT], high[COUNT];
#pragma unroll
        for (int rank = 0; rank < COUNT; ++rank) {
            uint2 part = rank == ranks.rank
                             ? x[at]
                             : wait_for_line(ranks.lines_of(ranks.rank, call, rank) + at, flag, ranks.aborted);
            low[rank] = part.x, high[rank] = part.y;
        }
        sum[at] = make_uint2(add<Type>(low), add<Type>(high));
    }
}

// One shot: every rank adds all elements. `vectors`: of 16 bytes.
template <class Type, int COUNT>
__device__ void reduce_once(const Ranks& ranks, u32 call, const uint4* x, long long vectors, uint4* sum) {
    uint4* own = reinterpret_cast<uint4*>(ranks.slot(ranks.rank, call));
    long long first = blockIdx.x * blockDim.x + threadIdx.x, step = gridDim.x * blockDim.x;
    for (long long at = first; at < vectors; at += step) own[at] = x[at];
    meet(ranks, 0, call);
    for (long long at = first; at < vectors; at += step) sum[at] = sum_at<Type, COUNT>(ranks, call, at);
}

// Two shots: every rank adds a range of the elements, and then reads the sums of the others; the same bits.
template <class Type, int COUNT>
__device__ void reduce_by_ranges(const Ranks& ranks, u32 call, const uint4* x, long long vectors, uint4* sum) {
    uint4* own = reinterpret_cast<uint4*>(ranks.slot(ranks.rank, call));
    long long first = blockIdx.x * blockDim.x + threadIdx.x, step = gridDim.x * blockDim.x;
    long long range = (vectors + COUNT - 1) / COUNT;
    for (long long place = first; place < range; place += step) {
#pragma unroll
        for (int rank = 0; rank < COUNT; ++rank) {
            long long at = rank * range + place;
            if (at < vectors) own[at] = x[at];
        }
    }
    meet(ranks, 0, call);
    for (long long place = first; place < range; place += step) {
        long long at = ranks.rank * range + place;
        if (at < vectors) own[at] = sum_at<Type, COUNT>(ranks, call, at);
    }
    meet(ranks, 1, call);
    for (long long place = first; place < range; place += step) {
#pragma unroll
        for (int rank = 0; rank < COUNT; ++rank) {
            long long at = rank * range + place;
            if (at < vectors) sum[at] = load(ranks.slot(rank, call) + 16 * at);
        }
    }
}

template <class Type, int COUNT>
__device__ void reduce(const Ranks& ranks, const uint4* x, long long vectors, int way, uint4* sum) {
    begin_next();
    wait_for_previous();
    u32 call = begin_call(ranks, 0);
    if (way == 2) {
        const uint2* from = reinterpret_cast<const uint2*>(x);
        reduce_lines<Type, COUNT>(ranks, call, from, 2 * vectors, reinterpret_cast<uint2*>(sum));
    } else if (way == 1) {
        reduce_by_ranges<Type, COUNT>(ranks, call, x, vectors, sum);
    } else {
        reduce_once<Type, COUNT>(ranks, call, x, vectors, sum);
    }
    end_call(ranks, 0, call);
}

#define ARGUMENTS const u64 *memory, int rank, int count, const int *aborted, long long most, long long lines
#define RANKS {memory, rank, count, aborted, most, lines}

#define ALL_REDUCE(NAME, TYPE)                                                                       \
    extern "C" __global__ void __launch_bounds__(512)                                                \
        all_reduce_early_##NAME(ARGUMENTS, const uint4* x, long long vectors, int way, uint4* sum) { \
        Ranks ranks = RANKS;                                                                         \
        if (count == 2) reduce<TYPE, 2>(ranks, x, vectors, way, sum);                                \
        if (count == 4) reduce<TYPE, 4>(ranks, x, vectors, way, sum);                                \
        if (count == 8) reduce<TYPE, 8>(ranks, x, vectors, way, sum);                                \
    }

IF_BF16(ALL_REDUCE(bf16, BFloat16))
IF_FP16(ALL_REDUCE(fp16, Float16))
IF_FP32(ALL_REDUCE(fp32, Float32))

__device__ __forceinline__ void copy_unit(const u16* from, u16* to) {
    *to = *reinterpret_cast<const volatile u16*>(from);
}
__device__ __forceinline__ void copy_unit(const u32* from, u32* to) {
    *to = *reinterpret_cast<const volatile u32*>(from);
}
__device__ __forceinline__ void copy_unit(const uint4* from, uint4* to) { *to = load(from); }

// gathered [rows, width] of x [rows, part] of all ranks, counted in units; rank r begins at min(r * part, width -
// part).
template <class Unit>
__device__ void gather(const Ranks& ranks, const Unit* x, int rows, int part, int width, Unit* gathered) {
    u32 call = begin_call(ranks, 0);
    Unit* own = reinterpret_cast<Unit*>(ranks.slot(ranks.rank, call));
    // A thread block has some columns of some rows, the same ones here and on the other ranks.
    int across = min((part + blockDim.x - 1) / blockDim.x, gridDim.x), down = gridDim.x / across;
    int first = blockIdx.x % across * blockDim.x + threadIdx.x, step = across * blockDim.x;
    int top = blockIdx.x / across < down ? blockIdx.x / across : rows;
    for (int row = top; row < rows; row += down) {
        long long begin = static_cast<long long>(row) * part;
        for (int column = first; column < part; column += step) own[begin + column] = x[begin + column];
    }
    meet(ranks, 0, call);
    for (int rank = 0; rank < ranks.count; ++rank) {
        const Unit* columns = rank == ranks.rank ? x : reinterpret_cast<const Unit*>(ranks.slot(rank, call));
        int begin = min(rank * part, width - part);
        int end = rank + 1 < ranks.count ? min((rank + 1) * part, width - part) : width;  // where the next rank begins
        for (int row = top; row < rows; row += down) {
            const Unit* from = columns + static_cast<long long>(row) * part;
            Unit* to = gathered + static_cast<long long>(row) * width + begin;
            for (int column = first; column < end - begin; column += step) copy_unit(from + column, to + column);
        }
    }
    end_call(ranks, 0, call);
}

#define ALL_GATHER(NAME, UNIT)                                                                       \
    extern "C" __global__ void __launch_bounds__(512)                                                \
        all_gather_##NAME(ARGUMENTS, const UNIT* x, int rows, int part, int width, UNIT* gathered) { \
        gather<UNIT>(RANKS, x, rows, part, width, gathered);                                         \
    }

ALL_GATHER(16, u16)
ALL_GATHER(32, u32)
ALL_GATHER(128, uint4)

// Rank 0: copy the inputs of a call, `entries` of (address, place, bytes), and let all ranks continue.
extern "C" __global__ void __launch_bounds__(512) publish(ARGUMENTS, const long long* entries, int number) {
    Ranks ranks = RANKS;
    u32 call = begin_call(ranks, COMMANDS);
    for (int entry = 0; entry < number; ++entry) {
        const u32* from = reinterpret_cast<const u32*>(entries[3 * entry]);
        u32* to = reinterpret_cast<u32*>(ranks.inputs(0) + entries[3 * entry + 1]);
        for (long long at = blockIdx.x * blockDim.x + threadIdx.x; at < entries[3 * entry + 2] / 4;
             at += gridDim.x * blockDim.x) {
            to[at] = from[at];
        }
    }
    // `receive` copies by place, not by entry: its thread blocks wait for all thread blocks here
    __syncthreads();
    if (threadIdx.x > 0 && threadIdx.x < count) raise_flag(ranks.command_flag(threadIdx.x), call);
    end_call(ranks, COMMANDS, call);
}

// Another rank: wait for the inputs of the next call and copy `vectors` of 16 bytes of them.
extern "C" __global__ void __launch_bounds__(512) receive(ARGUMENTS, uint4* inputs, long long vectors, int publishers) {
    Ranks ranks = RANKS;
    u32 call = begin_call(ranks, COMMANDS);
    if (threadIdx.x < publishers) {
        wait_for_flag(ranks.command_flag(rank) - blockIdx.x + threadIdx.x, call, aborted);
    }
    __syncthreads();
    for (long long at = blockIdx.x * blockDim.x + threadIdx.x; at < vectors; at += gridDim.x * blockDim.x) {
        inputs[at] = load(ranks.inputs(0) + 16 * at);
    }
    end_call(ranks, COMMANDS, call);
}
