/* Rows of low_bit_int8_matmul, compiled for AVX-512 and NEON; low_bit_int8_block.h are those of AVX2, by the same
 * operations in the same order. The file of a processor defines what differs: NAME, TARGET,
 * VECTOR_COLUMNS, FLOATS, WORDS, JOIN, PREFETCH, START, LOOK_UP, ADD_PAIR, WHOLE and MULTIPLY_ADD. All kinds give the
 * same bits. */

#define MOST_ROWS 8 /* whose sums fit into the registers */
#define VECTOR_TILES (VECTOR_COLUMNS > COLUMNS ? VECTOR_COLUMNS / COLUMNS : 1)

/* Unpack the weights of eight inputs, those of pair ``pair`` of a step: ``low`` gets the first four of each output.
 * ``plane``: further bits, of which those of earlier pairs are gone. */
TARGET INLINE void NAME(unpack)(const uint8_t* weight, size_t next_tile, size_t pair, const int bits,
                                const int by_table, WORDS entries, WORDS* plane, WORDS* low, WORDS* high) {
    const uint8_t* at = weight + (bits == 8 ? 64 : 32) * pair;
    const WORDS both = JOIN(WORDS, load_words(at), load_words(at + next_tile));
    *low = both & 0x0f0f0f0f;
    *high = both >> 4 & 0x0f0f0f0f;
    if (bits == 8) {
        *low = both;
        *high = JOIN(WORDS, load_words(at + 32), load_words(at + 32 + next_tile));
    } else if (bits > 4) {
        const uint32_t more = bits == 5 ? 0x10101010 : 0x30303030;
        *low |= *plane << 4 & more;
        *high |= *plane << (8 - bits) & more;
        *plane >>= 2 * (bits - 4);
    } else if (by_table) {
        *low = LOOK_UP(entries, *low);
        *high = LOOK_UP(entries, *high);
    }
}

/* Compute ``rows`` rows of VECTOR_COLUMNS outputs of weights of ``bits`` bits, from output ``column`` of a tile on. The
 * weights choose among the entries of a table if ``by_table``. ``rows``, ``bits`` and ``by_table`` are constants. A
 * tile that is missing computes the first one again. */
TARGET INLINE void NAME(block)(const Call* call, size_t tile, size_t column, size_t row, const int rows, const int bits,
                               const int by_table) {
    const int wide = by_table ? 8 : bits; /* of an integer that is multiplied */
    (void)wide;                           /* AVX-512 multiplies all in one way */
    const WORDS entries = by_table ? JOIN(WORDS, load_table(call->table), load_table(call->table)) : (WORDS){0};
    const size_t steps = call->steps, bytes = steps * STEP_BYTES(bits), parts = PARTS(bits), pairs = 4 / parts;
    const size_t values = call->groups * COLUMNS, outer_values = call->scales_of_output * COLUMNS;
    const size_t left = call->width - tile * COLUMNS - column, next = left > COLUMNS;
    const size_t at_values = tile * values + column, at_outer = tile * outer_values + column;
    const uint8_t* weight = call->weight + tile * bytes + 4 * column;
    const uint8_t* zeros = call->zeros ? call->zeros + at_values : NULL;
    const float* scales = call->scales + at_outer;
    const float* offsets = call->offsets ? call->offsets + at_outer : NULL;
    const int8_t* subscales = call->subscales ? call->subscales + at_values : NULL;
    const int8_t* suboffsets = call->suboffsets ? call->suboffsets + at_values : NULL;
    const Rounded* x = call->rounded + row * steps;
    FLOATS sums[MOST_ROWS], outer_scale = {0}, outer_offset = {0}, scale = {0}, offset = {0};
    FLOATS middle = {0};
    size_t left_in_group = 0, left_in_scale = 0;
    WORDS plane = {0};
    UNROLL
    for (int r = 0; r < rows; r++) sums[r] = (FLOATS){0};
    for (size_t step = 0; step < steps; step++, x++, weight += STEP_BYTES(bits)) {
        UNROLL
        for (size_t line = 0; line < STEP_BYTES(bits); line += 64) {
            PREFETCH(weight + VECTOR_TILES * bytes + line);
            PREFETCH(weight + (VECTOR_TILES + 1) * bytes + line);
        }
        UNROLL
        for (size_t part = 0; part < parts; part++, left_in_group--) {
            const size_t inputs = SUM_OF(parts, part);
            WORDS exact[MOST_ROWS];
            UNROLL
            for (int r = 0; r < rows; r++) exact[r] = START(x + (size_t)r * steps, inputs, wide);
            if (bits == 5 || bits == 6) {
                const uint8_t* at = weight + 128 + 32 * part;
                plane = JOIN(WORDS, load_words(at), load_words(at + next * bytes));
            }
            _Pragma("GCC unroll 1") for (size_t pair = part * pairs; pair < (part + 1) * pairs; pair++) {
                WORDS low, high;
                NAME(unpack)(weight, next * bytes, pair, bits, by_table, entries, &plane, &low, &high);
                UNROLL
                for (int r = 0; r < rows; r++) {
                    const int8_t* integers = x[(size_t)r * steps].integers + 8 * pair;
                    const WORDS first = LANES_OF(WORDS, load_word(integers));
                    exact[r] = ADD_PAIR(exact[r], low, first, high, LANES_OF(WORDS, load_word(integers + 4)), wide);
                }
            }
            if (left_in_group == 0) {
                left_in_group = call->parts_of_group;
                if (left_in_scale == 0) {
                    left_in_scale = call->groups_of_scale;
                    outer_scale = JOIN(FLOATS, load_floats(scales), load_floats(scales + next * outer_values));
                    PREFETCH(scales + VECTOR_TILES * outer_values);
                    PREFETCH(scales + (VECTOR_TILES + 1) * outer_values);
                    scales += COLUMNS;
                    if (offsets) {
                        outer_offset = JOIN(FLOATS, load_floats(offsets), load_floats(offsets + next * outer_values));
                        PREFETCH(offsets + VECTOR_TILES * outer_values);
                        PREFETCH(offsets + (VECTOR_TILES + 1) * outer_values);
                        offsets += COLUMNS;
                    }
                }
                left_in_scale--;
                scale = outer_scale;
                offset = outer_offset;
                if (subscales) {
                    scale *= JOIN(FLOATS, integers_as_floats(subscales), integers_as_floats(subscales + next * values));
                    subscales += COLUMNS;
                }
                if (suboffsets) {
                    offset *=
                        JOIN(FLOATS, integers_as_floats(suboffsets), integers_as_floats(suboffsets + next * values));
                    suboffsets += COLUMNS;
                }
                if (zeros) {
                    middle = -JOIN(FLOATS, bytes_as_floats(zeros), bytes_as_floats(zeros + next * values));
                    zeros += COLUMNS;
                }
            }
            UNROLL
            for (int r = 0; r < rows; r++) {
                const Rounded* rounded = x + (size_t)r * steps;
                FLOATS number = WHOLE(exact[r], wide); /* exact, also with the middle */
                if (zeros) number = MULTIPLY_ADD(middle, LANES_OF(FLOATS, rounded->sums[inputs]), number);
                sums[r] = MULTIPLY_ADD(number, scale * rounded->scale, sums[r]);
                if (call->offsets)
                    sums[r] = MULTIPLY_ADD(offset, LANES_OF(FLOATS, rounded->scaled_sums[inputs]), sums[r]);
            }
        }
    }
    UNROLL
    for (int r = 0; r < rows; r++) {
        float* out = call->out + (row + (size_t)r) * call->width + tile * COLUMNS + column;
        const FLOATS all = sums[r];
        if (left >= VECTOR_COLUMNS) {
            memcpy(out, &all, sizeof(all));
        } else {
            memcpy(out, &all, left * sizeof(float));
        }
    }
}

#define CASE(rows) \
    case rows: NAME(block)(call, tile, column, r, rows, bits, by_table); break;

TARGET INLINE void NAME(blocks)(const Call* call, size_t first, size_t last, size_t row, size_t end, const int bits,
                                const int by_table) {
    for (size_t tile = first; tile < last; tile += VECTOR_TILES) {
        const size_t left = call->width - tile * COLUMNS;
        for (size_t column = 0; column < COLUMNS && column < left; column += VECTOR_COLUMNS)
            for (size_t r = row, blocks = count_of(end - row, MOST_ROWS), rows; blocks; blocks--, r += rows) {
                rows = count_of(end - r, blocks); /* blocks of about equal size */
                switch (rows) {
                    CASE(1)
                    CASE(2)
                    CASE(3)
                    CASE(4)
                    CASE(5)
                    CASE(6)
                    CASE(7)
                    CASE(8)
                }
            }
    }
}
#undef CASE

TARGET void NAME(rows)(const Call* call, size_t first, size_t last, size_t row, size_t end) { ROWS_BY(NAME(blocks)) }
#undef VECTOR_TILES
