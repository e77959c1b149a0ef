/* Run one operator of the kernels without onnxruntime: run_operator NAME OUTPUTS [ATTRIBUTE=VALUE ...].
 *
 * Standard input: the number of inputs, and of each its element type, rank, dimensions (int64) and data; type 0 is an
 * input that is left out. Standard output: of each output its rank, dimensions and float32 data.
 */
#include <stdio.h>
#include <string.h>

#include "custom_operator.h"

#define MOST_OUTPUTS 3

typedef struct {
    int64_t type, rank, dims[MOST_DIMENSIONS];
    void* data;
} Value;

static Value inputs[MOST_INPUTS], outputs[MOST_OUTPUTS];
static size_t input_total, output_total;
static char** attributes; /* ends with NULL */
static const Operator* wanted;
static const char* name;

static void read_exactly(void* to, size_t bytes) {
    if (fread(to, 1, bytes, stdin) != bytes) exit(2);
}

static size_t bytes_of(const Value* value) {
    const int type = (int)value->type;
    size_t bytes = type == FLOAT ? 4 : type == INT64 ? 8 : type == UINT8 || type == INT8 ? 1 : 2;
    for (int64_t i = 0; i < value->rank; i++) bytes *= (size_t)value->dims[i];
    return bytes;
}

/* ---- the functions of OrtApi ---- */

static OrtStatus* create_status(int code, const char* message) {
    fprintf(stderr, "%d: %s\n", code, message);
    exit(1);
}
static OrtStatus* create_domain(const char* domain, void** made) {
    *made = (void*)domain;
    return NULL;
}
static OrtStatus* add_operator(void* domain, const Operator* op) {
    (void)domain;
    if (!strcmp(op->name(op), name)) wanted = op;
    return NULL;
}
static OrtStatus* add_domain(void* options, void* domain) {
    (void)options, (void)domain;
    return NULL;
}
static OrtStatus* tensor_data(const Value* value, void** data) {
    *data = value->data;
    return NULL;
}
static OrtStatus* tensor_shape(const Value* value, const void** shape) {
    *shape = value;
    return NULL;
}
static OrtStatus* element_type(const Value* value, int* type) {
    *type = (int)value->type;
    return NULL;
}
static OrtStatus* dimensions_count(const Value* value, size_t* count) {
    *count = (size_t)value->rank;
    return NULL;
}
static OrtStatus* dimensions(const Value* value, int64_t* dims, size_t count) {
    memcpy(dims, value->dims, count * sizeof(*dims));
    return NULL;
}
static void release_shape(void* shape) { (void)shape; }

static const char* attribute(const char* key) {
    const size_t length = strlen(key);
    for (char** each = attributes; *each; each++)
        if (!strncmp(*each, key, length) && (*each)[length] == '=') return *each + length + 1;
    fprintf(stderr, "no attribute %s\n", key);
    exit(2);
}
static OrtStatus* int_attribute(const void* info, const char* key, int64_t* value) {
    (void)info;
    *value = atoll(attribute(key));
    return NULL;
}
static OrtStatus* float_attribute(const void* info, const char* key, float* value) {
    (void)info;
    *value = strtof(attribute(key), NULL);
    return NULL;
}
static OrtStatus* total_inputs(void* context, size_t* count) {
    (void)context;
    *count = input_total;
    return NULL;
}
static OrtStatus* total_outputs(void* context, size_t* count) {
    (void)context;
    *count = output_total;
    return NULL;
}
static OrtStatus* input(void* context, size_t i, const void** value) {
    (void)context;
    *value = i < input_total && inputs[i].type ? &inputs[i] : NULL;
    return NULL;
}
static OrtStatus* output(void* context, size_t i, const int64_t* dims, size_t rank, void** value) {
    (void)context;
    outputs[i].type = FLOAT, outputs[i].rank = (int64_t)rank;
    memcpy(outputs[i].dims, dims, rank * sizeof(*dims));
    outputs[i].data = calloc(1, bytes_of(&outputs[i]) + 1);
    *value = &outputs[i];
    return NULL;
}
static OrtStatus* parallel_for(void* context, void (*item)(void*, size_t), size_t count, size_t batches, void* work) {
    (void)context, (void)batches;
    for (size_t i = count; i-- > 0;) item(work, i); /* in another order than one thread would */
    return NULL;
}

static const void* api[PARALLEL_FOR + 1] = {
    [CREATE_STATUS] = create_status,
    [CREATE_DOMAIN] = create_domain,
    [ADD_OPERATOR] = add_operator,
    [ADD_DOMAIN] = add_domain,
    [TENSOR_DATA] = tensor_data,
    [ELEMENT_TYPE] = element_type,
    [DIMENSIONS_COUNT] = dimensions_count,
    [DIMENSIONS] = dimensions,
    [TENSOR_SHAPE] = tensor_shape,
    [FLOAT_ATTRIBUTE] = float_attribute,
    [INT_ATTRIBUTE] = int_attribute,
    [INPUT_COUNT] = total_inputs,
    [OUTPUT_COUNT] = total_outputs,
    [INPUT] = input,
    [OUTPUT] = output,
    [RELEASE_SHAPE] = release_shape,
    [PARALLEL_FOR] = parallel_for,
};
static OrtApi get(uint32_t version) {
    (void)version;
    return api;
}

OrtStatus* RegisterCustomOps(void* options, const OrtApiBase* base);

int main(int count, char** arguments) {
    if (count < 3) return 2;
    const OrtApiBase base = {get, NULL};
    void* kernel = NULL;
    int64_t total;
    name = arguments[1], output_total = (size_t)atoll(arguments[2]), attributes = arguments + 3;
    RegisterCustomOps(NULL, &base);
    if (wanted == NULL || output_total > MOST_OUTPUTS) return 2;
    read_exactly(&total, sizeof(total));
    if (total > MOST_INPUTS) return 2;
    for (input_total = 0; input_total < (size_t)total; input_total++) {
        Value* value = &inputs[input_total];
        read_exactly(&value->type, sizeof(value->type));
        if (value->type == 0) continue;
        read_exactly(&value->rank, sizeof(value->rank));
        read_exactly(value->dims, (size_t)value->rank * sizeof(*value->dims));
        value->data = malloc(bytes_of(value) + 1);
        read_exactly(value->data, bytes_of(value));
    }
    wanted->create_v2(wanted, api, NULL, &kernel);
    wanted->compute_v2(kernel, NULL);
    for (size_t i = 0; i < output_total; i++) {
        fwrite(&outputs[i].rank, sizeof(int64_t), 1, stdout);
        fwrite(outputs[i].dims, sizeof(int64_t), (size_t)outputs[i].rank, stdout);
        fwrite(outputs[i].data, 1, bytes_of(&outputs[i]), stdout);
    }
    return 0;
}
