/* Some rows of one or two tiles of low_bit_int8_matmul with AVX2, for each number of rows. Its file defines NAME, and
 * EACH, which repeats a macro for each row: compilers would not keep an array in registers. */

/* Four inputs are in one register for both tiles, or for both halves of weights of 8 bits. Each of two sums in 16 bits
 * has half of the products: of 32 inputs by at most 15, or by 16 from the center of 5 bits, or of 16 by at most 32 from
 * that of 6 bits. */
#define ADD(r)                                                                                      \
    {                                                                                               \
        const __m256i x = _mm256_set1_epi32((int)load_word(x_##r->integers + 8 * pair + 4 * half)); \
        a_##r = _mm256_add_epi16(a_##r, _mm256_maddubs_epi16(low, x));                              \
        KEEP(a_##r);                                                                                \
        b_##r = _mm256_add_epi16(b_##r, _mm256_maddubs_epi16(high, x));                             \
        KEEP(b_##r);                                                                                \
    }
#define DECLARE(r)                                            \
    const Rounded* x_##r = call->rounded + (row + r) * steps; \
    sums[2 * r] = sums[2 * r + 1] = _mm256_setzero_ps();
#define BEGIN(r)                                                                       \
    IN_REGISTER(a_##r, A_##r);                                                         \
    IN_REGISTER(b_##r, B_##r);                                                         \
    a_##r = starts ? _mm256_set1_epi32(x_##r->pairs[inputs]) : _mm256_setzero_si256(); \
    b_##r = a_##r;
#define CONVERT(r)                                                                                     \
    a_##r = _mm256_madd_epi16(a_##r, one);                                                             \
    b_##r = _mm256_madd_epi16(b_##r, wide == 8 ? _mm256_set1_epi16(16) : one);                         \
    if (wide == 8) {                                                                                   \
        a_##r = _mm256_add_epi32(a_##r, _mm256_add_epi32(b_##r, _mm256_set1_epi32(x_##r->starts[2]))); \
    }                                                                                                  \
    __m256 number_a_##r = _mm256_cvtepi32_ps(a_##r), number_b_##r = _mm256_cvtepi32_ps(b_##r); /* exact */
#define ADD_MIDDLE(r)                                                                   \
    {                                                                                   \
        const __m256 sum = _mm256_set1_ps(x_##r->sums[inputs]);                         \
        number_a_##r = _mm256_fmadd_ps(v.middle[0], sum, number_a_##r);                 \
        if (tiles == 2) number_b_##r = _mm256_fmadd_ps(v.middle[1], sum, number_b_##r); \
    }
#define SCALE(r)                                                                                              \
    {                                                                                                         \
        const __m256 scale = _mm256_set1_ps(x_##r->scale);                                                    \
        sums[2 * r] = _mm256_fmadd_ps(number_a_##r, v.scale[0] * scale, sums[2 * r]);                         \
        if (tiles == 2) sums[2 * r + 1] = _mm256_fmadd_ps(number_b_##r, v.scale[1] * scale, sums[2 * r + 1]); \
    }
#define ADD_OFFSET(r)                                                                         \
    {                                                                                         \
        const __m256 sum = _mm256_set1_ps(x_##r->scaled_sums[inputs]);                        \
        sums[2 * r] = _mm256_fmadd_ps(v.offset[0], sum, sums[2 * r]);                         \
        if (tiles == 2) sums[2 * r + 1] = _mm256_fmadd_ps(v.offset[1], sum, sums[2 * r + 1]); \
    }
#define ADVANCE(r) x_##r++;
#define STORE(r) memcpy(call->out + (row + r) * call->width + tile * COLUMNS, &sums[2 * r], size);

/* Compute rows of two tiles, or of one if integers of 8 bits are multiplied. ``bits`` and ``by_table`` are constants. A
 * tile that is missing computes the first one again. */
AVX2 INLINE void NAME(const Call* call, size_t tile, size_t row, const int bits, const int by_table) {
    const int wide = by_table ? 8 : bits; /* of an integer that is multiplied */
    const size_t tiles = TILES_OF(wide), parts = PARTS(bits), pairs = 4 / parts, steps = call->steps;
    const size_t bytes = steps * STEP_BYTES(bits), left = call->width - tile * COLUMNS;
    const size_t size = (left < tiles * COLUMNS ? left : tiles * COLUMNS) * sizeof(float);
    const size_t values = call->groups * COLUMNS, outer_values = call->scales_of_output * COLUMNS;
    const size_t next = tiles == 2 && left > COLUMNS;
    const int starts = wide < 8 && (wide > 4 || !(call->zeros || call->offsets));
    const float center = starts ? MIDDLE(wide) : 0.0f;
    const int adds_middle = call->zeros || (call->offsets && starts);
    const __m256i one = _mm256_set1_epi16(1);
    const uint8_t* weight = call->weight + tile * bytes;
    Values v = {.next_outer = next * outer_values, .next = next * values, .scales = call->scales + tile * outer_values};
    if (call->offsets) v.offsets = call->offsets + tile * outer_values;
    if (call->subscales) v.subscales = call->subscales + tile * values;
    if (call->suboffsets) v.suboffsets = call->suboffsets + tile * values;
    if (call->zeros) v.zeros = call->zeros + tile * values;
    v.middle[0] = v.middle[1] = _mm256_set1_ps(center);
    v.outer_offset[0] = v.outer_offset[1] = _mm256_setzero_ps();
    size_t left_in_group = 0;
    __m256 sums[2 * MOST_ROWS];
    EACH(DECLARE)
    for (size_t step = 0; step < steps; step++, weight += STEP_BYTES(bits)) {
        __asm__("" : "+m"(sums)); /* in memory: the registers are for the sums of integers */
        UNROLL
        for (size_t line = 0; line < STEP_BYTES(bits); line += 64) { /* the processor's own do not follow two tiles */
            _mm_prefetch(weight + tiles * bytes + line, _MM_HINT_T1);
            if (tiles == 2) _mm_prefetch(weight + 3 * bytes + line, _MM_HINT_T1);
        }
        UNROLL
        for (size_t part = 0; part < parts; part++, left_in_group--) {
            const size_t inputs = SUM_OF(parts, part);
            __m256i plane = {0}, next_plane = {0};
            if (bits == 5 || bits == 6) {
                plane = load_words(weight + 128 + 32 * part);
                next_plane = load_words(weight + next * bytes + 128 + 32 * part);
            }
            EACH(BEGIN)
            _Pragma("GCC unroll 1") for (size_t pair = part * pairs; pair < (part + 1) * pairs; pair++) {
                UNROLL
                for (int half = 0; half < 2; half++) {
                    __m256i low = unpack(weight, pair, half, bits, &plane), high;
                    if (wide == 8) {
                        if (by_table) low = _mm256_shuffle_epi8(load_table(call->table), low);
                        high = _mm256_and_si256(_mm256_srli_epi16(low, 4), _mm256_set1_epi8(15));
                        low = _mm256_and_si256(low, _mm256_set1_epi8(15));
                    } else {
                        high = unpack(weight + next * bytes, pair, half, bits, &next_plane);
                    }
                    EACH(ADD)
                }
            }
            if (left_in_group == 0) {
                left_in_group = call->parts_of_group;
                read_group(call, &v, center);
            }
            EACH(CONVERT)
            if (adds_middle) {
                EACH(ADD_MIDDLE)
            }
            EACH(SCALE)
            if (call->offsets) {
                EACH(ADD_OFFSET)
            }
        }
        EACH(ADVANCE)
    }
    EACH(STORE)
}
#undef EACH
#undef NAME
#undef ADD
#undef DECLARE
#undef BEGIN
#undef CONVERT
#undef ADD_MIDDLE
#undef SCALE
#undef ADD_OFFSET
#undef ADVANCE
#undef STORE
