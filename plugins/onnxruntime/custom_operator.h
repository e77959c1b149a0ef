/* The part of onnxruntime's C API that a custom operator needs (onnxruntime_c_api.h). */
#ifndef CUSTOM_OPERATOR_H
#define CUSTOM_OPERATOR_H
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#define API_VERSION 17 /* the first with KernelContext_ParallelFor; later versions only append */

#define MOST_DIMENSIONS 8

#define WORTH_THREADS 16384 /* values of a call that several threads compute */

typedef struct OrtStatus OrtStatus;
typedef const void* const* OrtApi; /* a struct of function pointers, which never change their places */
typedef struct {
    OrtApi (*get)(uint32_t version);
    const char* (*version)(void);
} OrtApiBase;

enum { /* places in OrtApi */
       CREATE_STATUS = 0,
       CREATE_DOMAIN = 26,
       ADD_OPERATOR = 27,
       ADD_DOMAIN = 28,
       TENSOR_DATA = 51,
       ELEMENT_TYPE = 60,
       DIMENSIONS_COUNT = 61,
       DIMENSIONS = 62,
       TENSOR_SHAPE = 65,
       FLOAT_ATTRIBUTE = 85,
       INT_ATTRIBUTE = 86,
       INPUT_COUNT = 88,
       OUTPUT_COUNT = 89,
       INPUT = 90,
       OUTPUT = 91,
       RELEASE_SHAPE = 99,
       PARALLEL_FOR = 274,
};
#define API(place, result, ...) ((result (*)(__VA_ARGS__))api[place])

typedef struct Operator {
    uint32_t version;
    void* (*create)(const struct Operator*, OrtApi, const void* info);
    const char* (*name)(const struct Operator*);
    const char* (*provider)(const struct Operator*);
    int (*input_type)(const struct Operator*, size_t);
    size_t (*input_count)(const struct Operator*);
    int (*output_type)(const struct Operator*, size_t);
    size_t (*output_count)(const struct Operator*);
    void (*compute)(void*, void*);
    void (*destroy)(void*);
    int (*input_kind)(const struct Operator*, size_t);
    int (*output_kind)(const struct Operator*, size_t);
    int (*input_memory)(const struct Operator*, size_t);
    int (*variadic[4])(const struct Operator*);
    OrtStatus* (*create_v2)(const struct Operator*, OrtApi, const void* info, void** kernel);
    OrtStatus* (*compute_v2)(void* kernel, void* context);
    OrtStatus* (*infer_shape)(const struct Operator*, void*);
    int (*first_version)(const struct Operator*);
    int (*last_version)(const struct Operator*);
    void* later[4];
} Operator;

#define TRY(call)                                 \
    do {                                          \
        if ((status = (call)) != NULL) goto done; \
    } while (0)

static inline OrtStatus* failure(OrtApi api, const char* rule) {
    return API(CREATE_STATUS, OrtStatus*, int, const char*)(2, rule);
}

/* An input of a call; data is NULL if it is left out. */
typedef struct {
    void* data;
    int64_t dims[MOST_DIMENSIONS];
    size_t rank;
    int type; /* of its elements */
} Input;

/* Read an input whose rank is at most ``most``. */
static inline OrtStatus* read_input(OrtApi api, void* context, size_t i, size_t most, Input* input) {
    const void* value = NULL;
    void* shape = NULL;
    OrtStatus* status = NULL;
    TRY(API(INPUT, OrtStatus*, void*, size_t, const void**)(context, i, &value));
    if (value == NULL) goto done;
    TRY(API(TENSOR_DATA, OrtStatus*, const void*, void**)(value, &input->data));
    TRY(API(TENSOR_SHAPE, OrtStatus*, const void*, void**)(value, &shape));
    TRY(API(ELEMENT_TYPE, OrtStatus*, const void*, int*)(shape, &input->type));
    TRY(API(DIMENSIONS_COUNT, OrtStatus*, void*, size_t*)(shape, &input->rank));
    if (input->rank < 1 || input->rank > most) {
        status = failure(api, "tandemrt: the rank of an input is wrong");
        goto done;
    }
    TRY(API(DIMENSIONS, OrtStatus*, void*, int64_t*, size_t)(shape, input->dims, input->rank));
done:
    if (shape) API(RELEASE_SHAPE, void, void*)(shape);
    return status;
}

/* Return the product of all dimensions but the last. */
static inline size_t rows_of(const int64_t* dims, size_t rank) {
    size_t rows = 1;
    for (size_t i = 0; i + 1 < rank; i++) rows *= (size_t)dims[i];
    return rows;
}

/* Call ``item(work, i)`` for each i below ``count``, on onnxruntime's threads. */
static inline OrtStatus* parallel(OrtApi api, void* context, void (*item)(void*, size_t), size_t count, void* work) {
    if (count == 1) {
        item(work, 0);
        return NULL;
    }
    return API(PARALLEL_FOR, OrtStatus*, void*, void (*)(void*, size_t), size_t, size_t, void*)(context, item, count,
                                                                                                count, work);
}

/* Call ``item(work, row)`` for each of ``rows`` rows of ``width`` values; few values are not worth a second thread. */
static inline OrtStatus* each_row(OrtApi api, void* context, void (*item)(void*, size_t), size_t rows, size_t width,
                                  void* work) {
    if (rows * width >= WORTH_THREADS) return parallel(api, context, item, rows, work);
    for (size_t row = 0; row < rows; row++) item(work, row);
    return NULL;
}

/* Read an integer attribute when a kernel is made; ``info``: its node. */
static inline OrtStatus* read_integer(OrtApi api, const void* info, const char* name, int64_t* value) {
    return API(INT_ATTRIBUTE, OrtStatus*, const void*, const char*, int64_t*)(info, name, value);
}

/* Read a float attribute, as read_integer does. */
static inline OrtStatus* read_float(OrtApi api, const void* info, const char* name, float* value) {
    return API(FLOAT_ATTRIBUTE, OrtStatus*, const void*, const char*, float*)(info, name, value);
}

static inline size_t count_of(size_t size, size_t part) { return (size + part - 1) / part; }

/* What one thread computes of a matmul: tiles of outputs from first to last, of rows from row to end. */
typedef struct { size_t first, last, row, end; } Part;

/* Return part ``item``, of at most ``tiles_at_once`` of ``tiles`` and ``rows_at_once`` of ``rows``. */
static inline Part part_of(size_t item, size_t tiles, size_t tiles_at_once, size_t rows, size_t rows_at_once) {
    const size_t items = count_of(tiles, tiles_at_once);
    const size_t first = item % items * tiles_at_once, row = item / items * rows_at_once;
    const size_t last = first + tiles_at_once, end = row + rows_at_once;
    return (Part){first, last < tiles ? last : tiles, row, end < rows ? end : rows};
}

#define MOST_INPUTS 8
enum { ANY_TYPE = 0, FLOAT = 1, UINT8 = 2, INT8 = 3, INT64 = 7 };

/* An operator of this library, on the CPU, with outputs in float32. onnxruntime sees its first member alone. */
typedef struct {
    Operator seen;
    const char* name;
    size_t inputs, optional_inputs, outputs, optional_outputs; /* the last ones are optional */
    int input_types[MOST_INPUTS];
    size_t kernel_size;
    OrtStatus* (*init)(OrtApi api, const void* info, void* kernel); /* reads the attributes of a node */
} OwnOperator;

static inline const OwnOperator* own(const Operator* op) { return (const OwnOperator*)op; }
static inline const char* name_of(const Operator* op) { return own(op)->name; }
static inline size_t input_count(const Operator* op) { return own(op)->inputs; }
static inline size_t output_count(const Operator* op) { return own(op)->outputs; }
static inline int input_type(const Operator* op, size_t i) { return own(op)->input_types[i]; }
static inline int input_kind(const Operator* op, size_t i) { return i >= own(op)->inputs - own(op)->optional_inputs; }
static inline int output_kind(const Operator* op, size_t i) {
    return i >= own(op)->outputs - own(op)->optional_outputs;
}
static inline int output_type(const Operator* op, size_t i) {
    (void)op;
    (void)i;
    return FLOAT;
}
static inline const char* provider(const Operator* op) {
    (void)op;
    return NULL; /* the CPU */
}
static inline int memory(const Operator* op, size_t i) {
    (void)op;
    (void)i;
    return 0;
}
static inline int one(const Operator* op) {
    (void)op;
    return 1;
}
static inline int newest(const Operator* op) {
    (void)op;
    return 0x7fffffff;
}

static inline OrtStatus* create(const Operator* op, OrtApi api, const void* info, void** made) {
    void* kernel = malloc(own(op)->kernel_size);
    OrtStatus* status = kernel ? own(op)->init(api, info, kernel) : failure(api, "tandemrt: out of memory");
    if (status) {
        free(kernel);
        kernel = NULL;
    }
    *made = kernel;
    return status;
}
static inline void destroy(void* kernel) { free(kernel); }

/* What onnxruntime sees of an operator, whose file has the functions ``init`` and ``compute`` and the type Kernel. */
#define SEEN                                  \
    .seen =                                   \
        {                                     \
            .version = API_VERSION,           \
            .provider = provider,             \
            .name = name_of,                  \
            .input_type = input_type,         \
            .input_count = input_count,       \
            .input_kind = input_kind,         \
            .output_type = output_type,       \
            .output_count = output_count,     \
            .output_kind = output_kind,       \
            .input_memory = memory,           \
            .variadic = {one, one, one, one}, \
            .first_version = one,             \
            .last_version = newest,           \
            .create_v2 = create,              \
            .compute_v2 = compute,            \
            .destroy = destroy,               \
        },                                    \
    .kernel_size = sizeof(Kernel), .init = init

#endif
