/* The operator low_bit_int8_matmul as a custom operator of onnxruntime: x @ w.T for weights of 4, 5, 6 or 8 bits and
 * inputs rounded to 8 bits (plugins/reference/low_bit_int8.py defines both).
 *
 * A row has the same bits in any call, with AVX2 and with AVX-512: sums of 32 products, or 16 with 6 bits, are exact
 * integers, and every row adds these sums in the same order by the same operations. Rows share the unpacking of a
 * weight.
 */
#include "low_bit_int8.h"

#define INPUTS 8             /* of the operator */
#define TABLE 7              /* the input with the table */
#define ROUNDED_AT_ONCE 8192 /* inputs from which on several threads round them */

/* ---- portable ---- */

static void round_row(const Call* call, size_t row) {
    const float* x = call->x + row * call->inner;
    for (size_t step = 0; step < call->steps; step++) {
        Rounded* rounded = call->rounded + row * call->steps + step;
        size_t begin = step * STEP;
        size_t count = call->inner - begin < STEP ? call->inner - begin : STEP;
        float largest = 0.0f, nothing = 0.0f, inverse;
        int32_t sums[2] = {0};
        for (size_t i = 0; i < count; i++) {
            float size = fabsf(x[begin + i]);
            largest = size > largest ? size : largest;
            nothing += x[begin + i] * 0.0f; /* NaN if an input is not finite */
        }
        inverse = largest > TINY && nothing == 0.0f ? 127.0f / largest : 0.0f;
        memset(rounded->integers, 0, STEP);
        for (size_t i = 0; i < count && inverse != 0.0f; i++) {
            rounded->integers[i] = (int8_t)lrintf(x[begin + i] * inverse);
            sums[i / 16] += rounded->integers[i];
        }
        rounded->scale = inverse != 0.0f ? largest / 127.0f : nothing;
        rounded->sums[0] = (float)sums[0];
        rounded->sums[1] = (float)sums[1];
        complete(call, rounded);
    }
}

/* Return the integer of input ``i`` of a step, for output ``column`` of a tile. */
static int32_t integer_at(const Call* call, const uint8_t* weight, size_t i, size_t column) {
    const size_t bits = call->bits;
    const size_t run = i / 4, byte = column * 4 + i % 4; /* runs of four inputs have 32 bytes */
    if (bits == 8) return weight[run * 32 + byte];
    int32_t integer = weight[run / 2 * 32 + byte] >> run % 2 * 4 & 15;
    if (bits > 4) {
        const size_t more = bits - 4, runs = 8 / more; /* of a plane */
        const int32_t plane = weight[128 + run / runs * 32 + byte];
        integer |= (plane >> run % runs * more & ((1 << more) - 1)) << 4;
    }
    return call->table ? call->table[integer] : integer;
}

static float multiply_add(float a, float b, float c) {
#ifdef FP_FAST_FMAF
    return fmaf(a, b, c);
#else
    return c + a * b;
#endif
}

static void row_portable(const Call* call, size_t tile, size_t row) {
    const size_t parts = PARTS(call->bits), inputs = STEP / parts;
    float out[COLUMNS];
    for (size_t column = 0; column < COLUMNS; column++) {
        const uint8_t* weight = call->weight + tile * call->steps * STEP_BYTES(call->bits);
        float all = 0.0f;
        for (size_t part = 0; part < call->steps * parts; part++) {
            const Rounded* x = call->rounded + row * call->steps + part / parts;
            const size_t of_tile = part / call->parts_of_group,
                         group = (tile * call->groups + of_tile) * COLUMNS + column;
            const size_t outer = (tile * call->scales_of_output + of_tile / call->groups_of_scale) * COLUMNS + column;
            const size_t sum = SUM_OF(parts, part % parts);
            int32_t exact = 0;
            for (size_t i = part % parts * inputs; i < part % parts * inputs + inputs; i++)
                exact += integer_at(call, weight + part / parts * STEP_BYTES(call->bits), i, column) * x->integers[i];
            float zero = call->zeros ? (float)call->zeros[group] : call->offsets ? 0.0f : MIDDLE(call->wide);
            float number = (float)exact - zero * x->sums[sum]; /* exact */
            float scale = call->scales[outer] * (call->subscales ? (float)call->subscales[group] : 1.0f);
            all = multiply_add(number, scale * x->scale, all);
            if (call->offsets) {
                float offset = call->offsets[outer] * (call->suboffsets ? (float)call->suboffsets[group] : 1.0f);
                all = multiply_add(offset, x->scaled_sums[sum], all);
            }
        }
        out[column] = all;
    }
    size_t begin = tile * COLUMNS, left = call->width - begin;
    memcpy(call->out + row * call->width + begin, out, sizeof(float) * (left < COLUMNS ? left : COLUMNS));
}

static void rows_portable(const Call* call, size_t first, size_t last, size_t row, size_t end) {
    for (size_t tile = first; tile < last; tile++)
        for (size_t r = row; r < end; r++) row_portable(call, tile, r);
}
/* ---- the custom operator ---- */

/* Of the other files. */
RoundRow low_bit_int8_round_avx2, low_bit_int8_round_amx;
Rows low_bit_int8_rows_avx2, low_bit_int8_rows_avx512, low_bit_int8_rows_amx, low_bit_int8_rows_neon;
int low_bit_int8_has_tiles(void), low_bit_int8_has_dot_products(void);

typedef struct {
    OrtApi api;
    int64_t bits, group_size, width;
    RoundRow* round;
    Rows* multiply;
    size_t rows; /* of an item */
} Kernel;

typedef struct {
    const Kernel* kernel;
    const Call* call;
} Work;

static void round_item(void* work, size_t row) {
    const Work* w = work;
    w->kernel->round(w->call, row);
}

static void multiply_item(void* work, size_t item) {
    const Work* w = work;
    const Part part = part_of(item, count_of(w->call->width, COLUMNS), TILES, w->call->rows, w->kernel->rows);
    w->kernel->multiply(w->call, part.first, part.last, part.row, part.end);
}

static OrtStatus* compute(void* self, void* context) {
    const Kernel* kernel = self;
    OrtApi api = kernel->api;
    OrtStatus* status = NULL;
    void *output = NULL, *made = NULL, *scratch = NULL;
    Input inputs[INPUTS] = {0}, *x = inputs;
    size_t count = 0;
    TRY(API(INPUT_COUNT, OrtStatus*, void*, size_t*)(context, &count));
    for (size_t i = 0; i < count && i < INPUTS; i++)
        TRY(read_input(api, context, i, i ? 2 : MOST_DIMENSIONS, &inputs[i]));
    Call call = {.x = x->data, .weight = inputs[1].data, .scales = inputs[2].data, .zeros = inputs[3].data};
    call.offsets = inputs[4].data;
    call.subscales = inputs[5].data;
    call.suboffsets = inputs[6].data;
    call.table = inputs[TABLE].data;
    call.inner = (size_t)x->dims[x->rank - 1];
    call.width = (size_t)kernel->width;
    call.bits = (size_t)kernel->bits;
    call.wide = call.table ? 8 : call.bits;
    call.steps = count_of(call.inner, STEP);
    call.groups = count_of(call.steps * STEP, (size_t)kernel->group_size);
    call.parts_of_group = (size_t)kernel->group_size * PARTS(call.bits) / STEP;
    call.scales_of_output = (size_t)inputs[2].dims[1] / COLUMNS;
    call.groups_of_scale = call.scales_of_output ? count_of(call.groups, call.scales_of_output) : 1;
    call.rows = rows_of(x->dims, x->rank);
    const size_t tiles = count_of(call.width, COLUMNS), steps = call.rows * call.steps;
    const size_t sizes[INPUTS] = {
        0,
        call.steps * STEP_BYTES(call.bits),
        call.scales_of_output * COLUMNS,
        call.groups * COLUMNS,
        call.scales_of_output * COLUMNS,
        call.groups * COLUMNS,
        call.groups * COLUMNS,
    };
    int fit = call.groups == call.groups_of_scale * call.scales_of_output;
    fit &= !call.table || (call.bits == 4 && inputs[TABLE].rank == 1 && inputs[TABLE].dims[0] == ENTRIES);
    for (size_t i = 1; i < TABLE; i++)
        fit &= !inputs[i].rank || ((size_t)inputs[i].dims[0] >= tiles && (size_t)inputs[i].dims[1] == sizes[i]);
    if (!fit) {
        status = failure(api, "low_bit_int8_matmul: the shapes of the inputs do not fit");
        goto done;
    }
    x->dims[x->rank - 1] = kernel->width;
    TRY(API(OUTPUT, OrtStatus*, void*, size_t, const int64_t*, size_t, void**)(context, 0, x->dims, x->rank, &output));
    if (steps == 0) goto done;
    TRY(API(TENSOR_DATA, OrtStatus*, const void*, void**)(output, &made));
    call.out = made;
    const int by_tiles = kernel->rows == AMX_ROWS;
    const size_t bytes = (steps + (by_tiles ? LATER_ROWS * call.steps : 0)) * sizeof(Rounded);
    const size_t tile_steps = by_tiles ? count_of(call.rows, TILE_ROWS) * call.steps : 0;
    scratch = malloc(bytes + tile_steps * sizeof(TileRows));
    if (scratch == NULL) {
        status = failure(api, "low_bit_int8_matmul: out of memory");
        goto done;
    }
    call.rounded = scratch;
    call.tile_rows = (void*)((char*)scratch + bytes);
    Work work = {kernel, &call};
    if (call.rows * call.inner >= ROUNDED_AT_ONCE) {
        TRY(parallel(api, context, round_item, call.rows, &work));
    } else {
        for (size_t row = 0; row < call.rows; row++) round_item(&work, row);
    }
    TRY(parallel(api, context, multiply_item, count_of(tiles, TILES) * count_of(call.rows, kernel->rows), &work));
done:
    free(scratch);
    return status;
}

static OrtStatus* init(OrtApi api, const void* info, void* made) {
    OrtStatus* status = NULL;
    Kernel* kernel = made;
    *kernel = (Kernel){api, 0, 0, 0, round_row, rows_portable, ROWS};
#if defined(__x86_64__) && !defined(PORTABLE)
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
        kernel->round = low_bit_int8_round_avx2;
        kernel->multiply = low_bit_int8_rows_avx2;
#ifndef NO_AVX512
        if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
            __builtin_cpu_supports("avx512vnni"))
            kernel->multiply = low_bit_int8_rows_avx512;
        if (kernel->multiply == low_bit_int8_rows_avx512 && low_bit_int8_has_tiles()) {
            kernel->round = low_bit_int8_round_amx;
            kernel->multiply = low_bit_int8_rows_amx;
            kernel->rows = AMX_ROWS;
        }
#endif
    }
#elif defined(__aarch64__) && !defined(PORTABLE)
    if (low_bit_int8_has_dot_products()) kernel->multiply = low_bit_int8_rows_neon;
#endif
    TRY(read_integer(api, info, "bits", &kernel->bits));
    TRY(read_integer(api, info, "group_size", &kernel->group_size));
    TRY(read_integer(api, info, "width", &kernel->width));
    if (kernel->bits < 4 || kernel->bits == 7 || kernel->bits > 8 || kernel->width < 1)
        status = failure(api, "low_bit_int8_matmul: bits must be 4, 5, 6 or 8, and width positive");
    else if (kernel->group_size < 1 || kernel->group_size % (int64_t)(STEP / PARTS(kernel->bits)))
        status = failure(api, "low_bit_int8_matmul: group_size must be a multiple of 32, or of 16 with 6 bits");
done:
    return status;
}

const OwnOperator low_bit_int8_matmul = {
    SEEN,
    .name = "low_bit_int8_matmul",
    .inputs = INPUTS,
    .optional_inputs = 5,
    .outputs = 1,
    .input_types = {FLOAT, UINT8, FLOAT, UINT8, FLOAT, INT8, INT8, UINT8},
};
