/* Rows of int4_int8_matmul, compiled for each kind of processor. int4_int8_matmul.c defines what differs: NAME, TARGET,
 * VECTOR_TILES, MOST_ROWS, FLOATS, WORDS, JOIN, DOT, WHOLE and MULTIPLY_ADD. All kinds give the same bits. */

/* Compute ``rows`` rows, a constant, of VECTOR_TILES tiles. A tile that is missing computes the first one again. */
TARGET INLINE void NAME(block)(const Call* call, size_t tile, size_t row, const int rows) {
    const size_t steps = call->steps, bytes = steps * TILE_BYTES, values = call->groups * COLUMNS;
    const size_t left = call->width - tile * COLUMNS, next = left > COLUMNS;
    const uint8_t *weight = call->weight + tile * bytes, *zeros = call->zeros ? call->zeros + tile * values : NULL;
    const float* scales = call->scales + tile * values;
    const Rounded* x = call->rounded + row * steps;
    FLOATS sums[MOST_ROWS], scale = {0}, offset = LANES_OF(FLOATS, -8.0f);
    UNROLL
    for (int r = 0; r < rows; r++) sums[r] = (FLOATS){0};
    for (size_t step = 0, left_in_group = 0; step < steps; step++, x++, left_in_group--) {
        WORDS exact[MOST_ROWS];
        UNROLL
        for (int r = 0; r < rows; r++) exact[r] = (WORDS){0};
        _Pragma("GCC unroll 1") for (size_t pair = 0; pair < 4; pair++, weight += 32) {
            const WORDS both = JOIN(WORDS, load_words(weight), load_words(weight + next * bytes));
            PREFETCH(weight + (VECTOR_TILES + pair % 2) * bytes);
            const WORDS low = both & 0x0f0f0f0f, high = both >> 4 & 0x0f0f0f0f;
            UNROLL
            for (int r = 0; r < rows; r++) {
                const int8_t* integers = x[(size_t)r * steps].integers + 8 * pair;
                exact[r] = DOT(exact[r], low, LANES_OF(WORDS, load_word(integers)));
                exact[r] = DOT(exact[r], high, LANES_OF(WORDS, load_word(integers + 4)));
            }
        }
        if (left_in_group == 0) {
            left_in_group = call->steps_of_group;
            scale = JOIN(FLOATS, load_floats(scales), load_floats(scales + next * values));
            PREFETCH(scales + VECTOR_TILES * values);
            PREFETCH(scales + (VECTOR_TILES + 1) * values);
            scales += COLUMNS;
            if (zeros) {
                offset = -JOIN(FLOATS, bytes_as_floats(zeros), bytes_as_floats(zeros + next * values));
                zeros += COLUMNS;
            }
        }
        UNROLL
        for (int r = 0; r < rows; r++) {
            const Rounded* rounded = x + (size_t)r * steps;
            const FLOATS number = MULTIPLY_ADD(offset, LANES_OF(FLOATS, rounded->sum), WHOLE(exact[r])); /* exact */
            sums[r] = MULTIPLY_ADD(number, scale * rounded->scale, sums[r]);
        }
    }
    UNROLL
    for (int r = 0; r < rows; r++) {
        float* out = call->out + (row + (size_t)r) * call->width + tile * COLUMNS;
        const FLOATS all = sums[r];
        if (left >= VECTOR_TILES * COLUMNS) {
            memcpy(out, &all, sizeof(all));
        } else {
            memcpy(out, &all, left * sizeof(float));
        }
    }
}

#define CASE(rows) \
    case rows: NAME(block)(call, tile, r, rows); break;

TARGET static void NAME(rows)(const Call* call, size_t first, size_t last, size_t row, size_t end) {
    for (size_t tile = first; tile < last; tile += VECTOR_TILES)
        for (size_t r = row, blocks = count_of(end - row, MOST_ROWS), rows; blocks; blocks--, r += rows) {
            rows = count_of(end - r, blocks); /* blocks of about equal size */
            switch (rows) {
                CASE(1)
                CASE(2)
                CASE(3)
                CASE(4)
#if MOST_ROWS == 8
                CASE(5)
                CASE(6)
                CASE(7)
                CASE(8)
#endif
            }
        }
}
#undef CASE
