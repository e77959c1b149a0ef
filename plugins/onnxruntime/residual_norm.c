/* The operator residual_norm as a custom operator of onnxruntime: the sum of two streams, and its norm
 * (plugins/reference/residual_norm.py defines it).
 */
#include <math.h>
#include <string.h>

#include "custom_operator.h"
#include "vectors.h"

typedef struct {
    const float *x, *update; /* [rows, width] */
    const float* weight;     /* [width] */
    float *normed, *sum;     /* [rows, width]; the same memory if the sum is no output */
    size_t width;
    float epsilon;
} Call;

INLINE void norm(const Call* call, size_t row) {
    const size_t width = call->width, whole = width - width % LANES;
    const float *x = call->x + row * width, *update = call->update + row * width;
    float *normed = call->normed + row * width, *sum = call->sum + row * width;
    Lanes squares = {0};
    float rest = 0.0f;
    for (size_t i = 0; i < whole; i += LANES) {
        const Lanes both = load(x + i) + load(update + i);
        save(sum + i, both);
        squares += both * both;
    }
    for (size_t i = whole; i < width; i++) {
        sum[i] = x[i] + update[i];
        rest += sum[i] * sum[i];
    }
    const float scale = 1.0f / sqrtf((sum_of(squares) + rest) / (float)width + call->epsilon);
    for (size_t i = 0; i < whole; i += LANES) save(normed + i, load(sum + i) * scale * load(call->weight + i));
    for (size_t i = whole; i < width; i++) normed[i] = sum[i] * scale * call->weight[i];
}

static void norm_portable(void* call, size_t row) { norm(call, row); }
#if defined(__x86_64__) && !defined(PORTABLE)
__attribute__((target("avx2"))) static void norm_avx2(void* call, size_t row) { norm(call, row); }
#endif

/* ---- the custom operator ---- */

typedef struct {
    OrtApi api;
    float epsilon;
    void (*norm)(void* call, size_t row);
} Kernel;

static OrtStatus* compute(void* self, void* context) {
    const Kernel* kernel = self;
    OrtApi api = kernel->api;
    OrtStatus* status = NULL;
    void *output = NULL, *made[2] = {0};
    Input inputs[3] = {0}, *x = &inputs[0], *update = &inputs[1], *weight = &inputs[2];
    size_t outputs = 0;
    for (size_t i = 0; i < 3; i++) TRY(read_input(api, context, i, MOST_DIMENSIONS, &inputs[i]));
    const int64_t width = x->dims[x->rank - 1];
    if (update->rank != x->rank || memcmp(x->dims, update->dims, sizeof(int64_t) * x->rank) || weight->rank != 1 ||
        weight->dims[0] != width) {
        status = failure(api, "residual_norm: the shapes of the inputs do not fit");
        goto done;
    }
    const size_t rows = rows_of(x->dims, x->rank);
    TRY(API(OUTPUT_COUNT, OrtStatus*, void*, size_t*)(context, &outputs));
    for (size_t i = 0; i < outputs; i++) {
        TRY(API(OUTPUT, OrtStatus*, void*, size_t, const int64_t*, size_t, void**)(context, i, x->dims, x->rank,
                                                                                   &output));
        if (output) TRY(API(TENSOR_DATA, OrtStatus*, const void*, void**)(output, &made[i]));
    }
    if (rows * (size_t)width == 0) goto done;
    Call call = {.x = x->data, .update = update->data, .weight = weight->data, .normed = made[0]};
    call.sum = made[1] ? made[1] : made[0];
    call.width = (size_t)width, call.epsilon = kernel->epsilon;
    TRY(each_row(api, context, kernel->norm, rows, call.width, &call));
done:
    return status;
}

static OrtStatus* init(OrtApi api, const void* info, void* made) {
    OrtStatus* status = NULL;
    Kernel* kernel = made;
    *kernel = (Kernel){api, 0.0f, norm_portable};
#if defined(__x86_64__) && !defined(PORTABLE)
    if (__builtin_cpu_supports("avx2")) kernel->norm = norm_avx2;
#endif
    TRY(read_float(api, info, "epsilon", &kernel->epsilon));
done:
    return status;
}

const OwnOperator residual_norm = {
    SEEN,         .name = "residual_norm", .inputs = 3,
    .outputs = 2, .optional_outputs = 1,   .input_types = {FLOAT, FLOAT, FLOAT},
};
