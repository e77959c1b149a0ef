/* The operator decode_attention as a custom operator of onnxruntime: attention of new tokens over a linear cache
 * (plugins/reference/decode_attention.py defines it).
 *
 * A token has the same bits in any call: each head of each token is computed by the same operations in the same order.
 */
#define _GNU_SOURCE /* sched_getaffinity */
#include <math.h>
#include <sched.h>
#include <string.h>
#include <unistd.h>

#include "custom_operator.h"
#include "vectors.h"

#define KEYS 64     /* keys of a block */
#define ROWS 24     /* heads of tokens of an item at most: all of them use a block while it is in a cache */
#define TOKENS 12   /* tokens of an item whose rows have one head, where processors would have too few items */
#define TOGETHER 3  /* rows that use a key or value while it is in a register */
#define STEP 16     /* a head has a multiple of these values */
#define WIDEST 1024 /* values of a head at most */
#define INPUTS 7    /* the last is optional */

typedef struct {
    const float* qkv;           /* [batch, query, heads + 2 * kv_heads, dim] */
    const float *cosine, *sine; /* [positions, half] */
    const int64_t* index;       /* [batch] */
    const int64_t* ends;        /* [batch, query], up to which a token sees later positions, or NULL */
    float *keys, *values;       /* [batch, kv_heads, capacity, dim] */
    float* out;                 /* [batch, query, heads, dim] */
    size_t batch, query, heads, kv_heads, dim, capacity, half, sliding_window;
    size_t parts; /* items of a KV head and a row of the batch */
    float scale;
} Call;

#ifdef __has_builtin
#if __has_builtin(__builtin_shufflevector)
/* The sums of neighbours: of a and b in turns of two, in each half. */
#define PAIRS(a, b)                                                 \
    (__builtin_shufflevector((a), (b), 0, 2, 8, 10, 4, 6, 12, 14) + \
     __builtin_shufflevector((a), (b), 1, 3, 9, 11, 5, 7, 13, 15))
typedef float Quarter __attribute__((vector_size(16), aligned(4)));
#endif
#endif

#define UNROLL _Pragma("GCC unroll 8") /* else arrays of vectors do not stay in registers */

/* A head of a token of an item, with its weights of a block and what it has of the blocks before. */
typedef struct {
    float weights[KEYS]; /* before: scores */
    const float* query;
    float *mixed, most; /* its sums, its highest score */
    float rescale;      /* what the sums are multiplied by before the next block */
    Lanes total;        /* of its weights, in parts */
    size_t first, end;  /* the keys that it sees */
} Row;

/* Rotate the halves of the first 2 * half values of a head, and copy the others. */
INLINE void rotate(const Call* call, const float* restrict from, size_t position, float* restrict to) {
    const size_t half = call->half;
    const float *cosine = call->cosine + position * half, *sine = call->sine + position * half;
    for (size_t i = 0; i < half; i++) {
        to[i] = from[i] * cosine[i] - from[half + i] * sine[i];
        to[half + i] = from[half + i] * cosine[i] + from[i] * sine[i];
    }
    memcpy(to + 2 * half, from + 2 * half, sizeof(float) * (call->dim - 2 * half));
}

/* Write the new keys and values into the cache. */
INLINE void append(const Call* call) {
    const size_t dim = call->dim, width = (call->heads + 2 * call->kv_heads) * dim;
    for (size_t token = 0; token < call->batch * call->query; token++) {
        const size_t row = token / call->query, position = (size_t)call->index[row] + token % call->query;
        const float *key = call->qkv + token * width + call->heads * dim, *value = key + call->kv_heads * dim;
        for (size_t head = 0; head < call->kv_heads; head++) {
            const size_t at = ((row * call->kv_heads + head) * call->capacity + position) * dim;
            rotate(call, key + head * dim, position, call->keys + at);
            memcpy(call->values + at, value + head * dim, sizeof(float) * dim);
        }
    }
}

#if defined(PORTABLE) || !defined(HAS_AVX2)
#define NAME(function) function##_portable
#define TARGET
#define MULTIPLY_ADD(a, b, c) ((a) * (b) + (c))
#define BROADCAST(at) lanes_of(*(at))
#define KEEP(x) (void)0
#include "attend.h"
#undef NAME
#undef TARGET
#undef MULTIPLY_ADD
#undef BROADCAST
#undef KEEP
#else
#define attend_portable attend_avx2 /* the processor has it: the other one would take as long to compile */
#endif

#if defined(__x86_64__) && !defined(PORTABLE)
#include "avx2.h"
#define NAME(function) function##_avx2
#define TARGET __attribute__((target("avx2,fma")))
#define MULTIPLY_ADD(a, b, c) ((Lanes)_mm256_fmadd_ps((__m256)(a), (__m256)(b), (__m256)(c)))
#define BROADCAST(at) ((Lanes)_mm256_broadcast_ss(at))
#define KEEP(x) __asm__("" : "+x"(x)) /* in a register: compilers would load it for each use */
#include "attend.h"
#endif

/* ---- the custom operator ---- */

typedef struct {
    OrtApi api;
    int64_t heads, sliding_window;
    size_t processors;
    float scale;
    void (*attend)(void* call, size_t item);
} Kernel;

/* Check the shapes and fill in the sizes. Returns the rule that is broken. */
static const char* fit(Call* call, const Input inputs[INPUTS]) {
    const int64_t *qkv = inputs[0].dims, *cache = inputs[1].dims, *values = inputs[2].dims;
    const int64_t *index = inputs[3].dims, *tables = inputs[4].dims, *ends = inputs[6].dims;
    call->batch = (size_t)qkv[0], call->query = (size_t)qkv[1];
    call->kv_heads = (size_t)cache[1], call->capacity = (size_t)cache[2], call->dim = (size_t)cache[3];
    call->half = (size_t)tables[1];
    if (call->dim % STEP || call->dim > WIDEST || 2 * call->half > call->dim)
        return "decode_attention: a head must have a multiple of 16 and at most 1,024 values";
    if (call->kv_heads == 0 || call->heads % call->kv_heads || cache[0] != qkv[0] || index[0] != qkv[0] ||
        (size_t)qkv[2] != (call->heads + 2 * call->kv_heads) * call->dim || memcmp(cache, values, 4 * sizeof(*cache)) ||
        (call->ends && (ends[0] != qkv[0] || ends[1] != qkv[1])))
        return "decode_attention: the shapes of the inputs do not fit";
    const int64_t end = call->half && tables[0] < cache[2] ? tables[0] : cache[2];
    for (size_t row = 0; row < call->batch; row++)
        if (call->index[row] < 0 || call->index[row] > end - qkv[1])
            return "decode_attention: write_index and the new tokens must lie within the cache and the rotary tables";
    for (int64_t token = 0; call->ends && token < qkv[0] * qkv[1]; token++)
        if (call->ends[token] > call->index[token / qkv[1]] + qkv[1])
            return "decode_attention: ends must lie within the new tokens";
    return NULL;
}

static OrtStatus* compute(void* self, void* context) {
    const Kernel* kernel = self;
    OrtApi api = kernel->api;
    OrtStatus* status = NULL;
    void *output = NULL, *present[2] = {0}, *made = NULL;
    Input inputs[INPUTS] = {0};
    size_t count = 0;
    TRY(API(INPUT_COUNT, OrtStatus*, void*, size_t*)(context, &count));
    for (size_t i = 0; i < count && i < INPUTS; i++) TRY(read_input(api, context, i, 4, &inputs[i]));
    const Input *qkv = &inputs[0], *caches = &inputs[1];
    Call call = {.qkv = qkv->data, .index = inputs[3].data, .cosine = inputs[4].data, .sine = inputs[5].data};
    call.ends = inputs[6].data, call.scale = kernel->scale;
    call.heads = (size_t)kernel->heads, call.sliding_window = (size_t)kernel->sliding_window;
    const char* rule = fit(&call, inputs);
    if (rule) {
        status = failure(api, rule);
        goto done;
    }
    for (size_t i = 0; i < 2; i++) {
        const size_t size = sizeof(float) * call.batch * call.kv_heads * call.capacity * call.dim;
        TRY(API(OUTPUT, OrtStatus*, void*, size_t, const int64_t*, size_t, void**)(context, i + 1, caches->dims, 4,
                                                                                   &output));
        TRY(API(TENSOR_DATA, OrtStatus*, const void*, void**)(output, &present[i]));
        if (present[i] != caches[i].data) memcpy(present[i], caches[i].data, size); /* not in place */
    }
    int64_t mixed[3] = {qkv->dims[0], qkv->dims[1], (int64_t)(call.heads * call.dim)};
    TRY(API(OUTPUT, OrtStatus*, void*, size_t, const int64_t*, size_t, void**)(context, 0, mixed, 3, &output));
    if (call.batch * call.query == 0) goto done;
    TRY(API(TENSOR_DATA, OrtStatus*, const void*, void**)(output, &made));
    call.keys = present[0], call.values = present[1], call.out = made;
    append(&call);
    const size_t group = call.heads / call.kv_heads, others = call.batch * call.kv_heads;
    const size_t fewest = count_of(group * call.query, ROWS), most = group * count_of(call.query, TOKENS);
    const size_t wanted = count_of(kernel->processors, others);
    call.parts = wanted < fewest ? fewest : wanted < most ? wanted : most;
    TRY(parallel(api, context, kernel->attend, others * call.parts, &call));
done:
    return status;
}

/* Return how many processors this process may use. */
static size_t usable_processors(void) {
#ifdef CPU_COUNT
    cpu_set_t usable;
    if (sched_getaffinity(0, sizeof(usable), &usable) == 0) return (size_t)CPU_COUNT(&usable);
#endif
    return (size_t)sysconf(_SC_NPROCESSORS_ONLN);
}

static OrtStatus* init(OrtApi api, const void* info, void* made) {
    OrtStatus* status = NULL;
    Kernel* kernel = made;
    *kernel = (Kernel){api, 0, 0, usable_processors(), 0.0f, attend_portable};
#if defined(__x86_64__) && !defined(PORTABLE)
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) kernel->attend = attend_avx2;
#endif
    TRY(read_integer(api, info, "heads", &kernel->heads));
    TRY(read_integer(api, info, "sliding_window", &kernel->sliding_window));
    TRY(read_float(api, info, "scale", &kernel->scale));
    if (kernel->heads < 1 || kernel->sliding_window < 0)
        status = failure(api, "decode_attention: heads must be positive, and sliding_window not negative");
done:
    return status;
}

const OwnOperator decode_attention = {
    SEEN,
    .name = "decode_attention",
    .inputs = INPUTS,
    .optional_inputs = 1,
    .outputs = 3,
    .input_types = {FLOAT, FLOAT, FLOAT, INT64, FLOAT, FLOAT, INT64},
};
