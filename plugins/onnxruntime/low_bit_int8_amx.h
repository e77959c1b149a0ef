/* Many rows of low_bit_int8_matmul with AMX: its tiles add the products of four inputs, of 16 rows and 16 outputs, at
 * once. Their sums are the integers that other processors add, so the bits are the same.
 */
#include <sys/syscall.h>
#include <unistd.h>

#define WORTH_TILES 48 /* rows; fewer are faster without */
#define AT_ONCE 4      /* steps whose weights are unpacked together */
#define PAIRS (TILES / 2)
#define TARGET_AMX __attribute__((target("avx512f,avx512bw,avx512vnni,fma,amx-tile,amx-int8")))

/* What a thread keeps of an item, in its nearest caches. */
typedef struct {
    Words16 weights[PAIRS][AT_ONCE * 8]; /* four inputs of 16 outputs each, from -128 to 127 */
    __m512 scales[PAIRS][AT_ONCE], offsets[PAIRS][AT_ONCE], middles[PAIRS][AT_ONCE];
    int32_t exact[2][AT_ONCE][TILE_ROWS][16]; /* of a pair, and of the next one */
    __m512 sums[AMX_ROWS / TILE_ROWS][PAIRS][TILE_ROWS];
} Item;

/* The registers: 0 and 1 sums, 2 and 3 weights, 4 to 7 inputs. */
static const struct {
    uint8_t palette, start, unused[14];
    uint16_t bytes_of_row[16];
    uint8_t rows[16];
} REGISTERS = {1, 0, {0}, {64, 64, 64, 64, 32, 32, 32, 32}, {16, 16, 8, 8, 16, 16, 16, 16}};

/* Return whether the processor has the tiles and the operating system lets this process use them. */
int low_bit_int8_has_tiles(void) {
    enum { REQUEST_PERMISSION = 0x1023, TILE_DATA = 18 }; /* of arch_prctl */
    unsigned a, b, c, d;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d >> 24 & 3) != 3) return 0; /* AMX-TILE and AMX-INT8 */
    return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
}

/* Round row ``row``, and store its values beside those of the rows that are multiplied with it. */
RoundRow low_bit_int8_round_avx2;
void low_bit_int8_round_amx(const Call* call, size_t row) {
    low_bit_int8_round_avx2(call, row);
    if (call->rows < WORTH_TILES) return;
    const Rounded* rounded = call->rounded + row * call->steps;
    TileRows* rows = call->tile_rows + row / TILE_ROWS * call->steps;
    for (size_t step = 0; step < call->steps; step++, rounded++, rows++) {
        rows->scale[row % TILE_ROWS] = rounded->scale;
        rows->sums[row % TILE_ROWS] = rounded->sums[2];
        rows->scaled_sums[row % TILE_ROWS] = rounded->scaled_sums[2];
    }
}

/* Unpack ``count`` steps from step ``at`` on of a pair of tiles, and read their values. */
TARGET_AMX INLINE void unpack_steps(const Call* call, size_t tile, size_t at, size_t count, const int bits,
                                    const int by_table, size_t pair, const size_t* group, const size_t* outer,
                                    Item* item) {
    const size_t bytes = call->steps * STEP_BYTES(bits);
    const size_t next = call->width - tile * COLUMNS > COLUMNS;
    const size_t values = call->groups * COLUMNS, outer_values = call->scales_of_output * COLUMNS;
    const Words16 entries = by_table ? JOIN(Words16, load_table(call->table), load_table(call->table)) : (Words16){0};
    const __m512i middle = _mm512_set1_epi8((char)(int)MIDDLE(by_table ? 8 : bits));
    Words16 *to = item->weights[pair], plane = {0};
    for (size_t i = 0; i < count; i++) {
        const size_t step = at + i;
        const uint8_t* weight = call->weight + tile * bytes + step * STEP_BYTES(bits);
        if (bits == 5) {
            const uint8_t* more = weight + 128;
            plane = JOIN(Words16, load_words(more), load_words(more + next * bytes));
        }
        UNROLL
        for (size_t p = 0; p < 4; p++, to += 2) {
            Words16 low, high;
            NAME(unpack)(weight, next * bytes, p, bits, by_table, entries, &plane, &low, &high);
            to[0] = (Words16)_mm512_sub_epi8((__m512i)low, middle);
            to[1] = (Words16)_mm512_sub_epi8((__m512i)high, middle);
        }
        UNROLL
        for (size_t line = 0; line < STEP_BYTES(bits); line += 64) {
            PREFETCH(weight + AT_ONCE * STEP_BYTES(bits) + line);
            PREFETCH(weight + AT_ONCE * STEP_BYTES(bits) + next * bytes + line);
        }
        const size_t value = tile * values + group[i] * COLUMNS;
        const size_t outer_value = tile * outer_values + outer[i] * COLUMNS;
        __m512 scale = JOIN(__m512, load_floats(call->scales + outer_value),
                            load_floats(call->scales + outer_value + next * outer_values));
        if (call->subscales) {
            const int8_t* from = call->subscales + value;
            scale *= JOIN(__m512, integers_as_floats(from), integers_as_floats(from + next * values));
        }
        item->scales[pair][i] = scale;
        if (call->offsets) {
            const float* from = call->offsets + outer_value;
            __m512 offset = JOIN(__m512, load_floats(from), load_floats(from + next * outer_values));
            if (call->suboffsets) {
                const int8_t* sub = call->suboffsets + value;
                offset *= JOIN(__m512, integers_as_floats(sub), integers_as_floats(sub + next * values));
            }
            item->offsets[pair][i] = offset;
        }
        __m512 zero = {0};
        if (call->zeros) {
            const uint8_t* from = call->zeros + value;
            zero = JOIN(__m512, bytes_as_floats(from), bytes_as_floats(from + next * values));
        }
        item->middles[pair][i] = MIDDLE(by_table ? 8 : bits) - zero;
    }
}

#define EACH_ROW _Pragma("GCC unroll 16") for (int r = 0; r < TILE_ROWS; r++)
/* Steps, and their registers. */
#define EACH_STEP(do) \
    do (0, 0, 2, 4) do(1, 1, 3, 5) do(2, 0, 2, 6) do(3, 1, 3, 7)
#define LOAD_INPUTS(step, sum, weight, input) \
    if (count > step) _tile_loadd(input, x[at + step].integers, stride);
#define MULTIPLY(step, sum, weight, input)                       \
    if (count > step) {                                          \
        _tile_loadd(weight, item->weights[pair] + 8 * step, 64); \
        _tile_zero(sum);                                         \
        _tile_dpbssd(sum, input, weight);                        \
        _tile_stored(sum, item->exact[pair % 2][step], 64);      \
    }

/* Add the products of ``count`` steps of a pair, from step ``at`` on, to the sums of a block of rows. */
TARGET_AMX INLINE void add_steps(Item* item, const TileRows* rows, size_t block, size_t pair, size_t at, size_t count,
                                 const int adds_middle, const int adds_offset) {
    __m512 sums[TILE_ROWS], *all = item->sums[block][pair];
    EACH_ROW sums[r] = all[r];
    for (size_t i = 0; i < count; i++) {
        const __m512 scale = item->scales[pair][i], offset = item->offsets[pair][i], middle = item->middles[pair][i];
        const TileRows* x = rows + at + i;
        EACH_ROW {
            __m512 number = _mm512_cvtepi32_ps(*(const __m512i*)item->exact[pair % 2][i][r]);
            if (adds_middle) number = _mm512_fmadd_ps(middle, _mm512_set1_ps(x->sums[r]), number);
            sums[r] = _mm512_fmadd_ps(number, scale * x->scale[r], sums[r]);
            if (adds_offset) sums[r] = _mm512_fmadd_ps(offset, _mm512_set1_ps(x->scaled_sums[r]), sums[r]);
        }
    }
    EACH_ROW all[r] = sums[r];
}

TARGET_AMX INLINE void multiply_item_by_tiles(const Call* call, size_t first, size_t last, size_t row, size_t end,
                                              const int bits, const int by_table) {
    const size_t steps = call->steps, stride = steps * sizeof(Rounded);
    const size_t pairs = count_of(last - first, 2), blocks = count_of(end - row, TILE_ROWS);
    Item here, *item = &here;
    memset(item->sums, 0, sizeof(item->sums));
    _tile_loadconfig(&REGISTERS);
    for (size_t at = 0; at < steps; at += AT_ONCE) {
        const size_t count = steps - at < AT_ONCE ? steps - at : AT_ONCE;
        size_t group[AT_ONCE], outer[AT_ONCE];
        for (size_t i = 0; i < count; i++) {
            group[i] = (at + i) / call->parts_of_group;
            outer[i] = group[i] / call->groups_of_scale;
        }
        for (size_t pair = 0; pair < pairs; pair++)
            unpack_steps(call, first + 2 * pair, at, count, bits, by_table, pair, group, outer, item);
        for (size_t block = 0; block < blocks; block++) {
            const Rounded* x = call->rounded + (row + block * TILE_ROWS) * call->steps;
            const TileRows* rows = call->tile_rows + (row / TILE_ROWS + block) * call->steps;
            __asm__ volatile("" ::: "memory"); /* compilers do not know that tiles read memory */
            EACH_STEP(LOAD_INPUTS)
            for (size_t pair = 0; pair <= pairs; pair++) { /* tiles multiply while the last pair is added */
                if (pair < pairs) {
                    EACH_STEP(MULTIPLY)
                }
                if (pair == 0) continue;
                if (call->offsets) {
                    add_steps(item, rows, block, pair - 1, at, count, 1, 1);
                } else if (call->zeros) {
                    add_steps(item, rows, block, pair - 1, at, count, 1, 0);
                } else {
                    add_steps(item, rows, block, pair - 1, at, count, 0, 0);
                }
            }
        }
    }
    _tile_release();
    for (size_t r = row; r < end; r++)
        for (size_t pair = 0; pair < pairs; pair++) {
            const size_t begin = (first + 2 * pair) * COLUMNS, most = (last - first - 2 * pair) * COLUMNS;
            size_t left = call->width - begin;
            left = left < most ? left : most;
            memcpy(call->out + r * call->width + begin, &item->sums[(r - row) / TILE_ROWS][pair][(r - row) % TILE_ROWS],
                   sizeof(float) * (left < 16 ? left : 16));
        }
}

TARGET_AMX void low_bit_int8_rows_amx(const Call* call, size_t first, size_t last, size_t row, size_t end) {
    if (end - row < WORTH_TILES || call->bits == 6) {
        NAME(rows)(call, first, last, row, end);
        return;
    }
    if (call->table) {
        multiply_item_by_tiles(call, first, last, row, end, 4, 1);
        return;
    }
    switch (call->bits) {
        case 4: multiply_item_by_tiles(call, first, last, row, end, 4, 0); break;
        case 5: multiply_item_by_tiles(call, first, last, row, end, 5, 0); break;
        case 8: multiply_item_by_tiles(call, first, last, row, end, 8, 0); break;
    }
}
