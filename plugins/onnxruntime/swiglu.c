/* The operator swiglu as a custom operator of onnxruntime: silu(gate) * up (plugins/reference/swiglu.py defines it). */
#include <string.h>

#include "custom_operator.h"
#include "vectors.h"

typedef struct {
    const float* gate_up; /* [rows, 2, width] */
    float* out;           /* [rows, width] */
    size_t width;
} Call;

INLINE Lanes activated(Lanes gate, Lanes up) { return gate / (1.0f + exponential(-gate)) * up; }

INLINE void activate(const Call* call, size_t row) {
    const size_t width = call->width, whole = width - width % LANES;
    const float *gate = call->gate_up + row * 2 * width, *up = gate + width;
    float *out = call->out + row * width, last[2][LANES] = {{0}};
    for (size_t i = 0; i < whole; i += LANES) save(out + i, activated(load(gate + i), load(up + i)));
    if (whole == width) return;
    memcpy(last[0], gate + whole, sizeof(float) * (width - whole));
    memcpy(last[1], up + whole, sizeof(float) * (width - whole));
    save(last[0], activated(load(last[0]), load(last[1])));
    memcpy(out + whole, last[0], sizeof(float) * (width - whole));
}

static void activate_portable(void* call, size_t row) { activate(call, row); }
#if defined(__x86_64__) && !defined(PORTABLE)
__attribute__((target("avx2"))) static void activate_avx2(void* call, size_t row) { activate(call, row); }
#endif

/* ---- the custom operator ---- */

typedef struct {
    OrtApi api;
    void (*activate)(void* call, size_t row);
} Kernel;

static OrtStatus* compute(void* self, void* context) {
    const Kernel* kernel = self;
    OrtApi api = kernel->api;
    OrtStatus* status = NULL;
    void *output = NULL, *made = NULL;
    Input x = {0};
    TRY(read_input(api, context, 0, MOST_DIMENSIONS, &x));
    if (x.dims[x.rank - 1] % 2) {
        status = failure(api, "swiglu: the last dimension must be even");
        goto done;
    }
    x.dims[x.rank - 1] /= 2;
    const size_t rows = rows_of(x.dims, x.rank);
    TRY(API(OUTPUT, OrtStatus*, void*, size_t, const int64_t*, size_t, void**)(context, 0, x.dims, x.rank, &output));
    Call call = {.gate_up = x.data, .width = (size_t)x.dims[x.rank - 1]};
    if (rows * call.width == 0) goto done;
    TRY(API(TENSOR_DATA, OrtStatus*, const void*, void**)(output, &made));
    call.out = made;
    TRY(each_row(api, context, kernel->activate, rows, call.width, &call));
done:
    return status;
}

static OrtStatus* init(OrtApi api, const void* info, void* made) {
    Kernel* kernel = made;
    (void)info;
    *kernel = (Kernel){api, activate_portable};
#if defined(__x86_64__) && !defined(PORTABLE)
    if (__builtin_cpu_supports("avx2")) kernel->activate = activate_avx2;
#endif
    return NULL;
}

const OwnOperator swiglu = {
    SEEN, .name = "swiglu", .inputs = 1, .outputs = 1, .input_types = {FLOAT},
};
