/* A call of low_bit_int8_matmul, for the files that compute it: one for each kind of processor, because each takes
 * seconds to compile. */
#ifndef LOW_BIT_INT8_H
#define LOW_BIT_INT8_H
/* The loops are written out: higher levels take twice as long for code as fast. */
#pragma GCC optimize("O1")
#include <math.h>
#include <string.h>

#include "custom_operator.h"

#define COLUMNS 8 /* outputs of a tile */
#define STEP 32   /* inputs whose products are summed as integers; they share the scale of x */
#define STEP_BYTES(bits) ((size_t)(COLUMNS * STEP / 8 * (bits))) /* of a tile */
#define PARTS(bits) ((bits) == 6 ? (size_t)2 : (size_t)1)        /* of a step, which may be in different groups */
#define MIDDLE(bits) ((float)(1 << ((bits) - 1)))                /* the zero point of weights that store none */
#define ENTRIES 16                                               /* of a table */
#define TILES 8                                                  /* tiles of an item, which one thread computes */
#define ROWS 32                    /* its rows: the rounded inputs of few rows stay in the nearest cache */
#define AMX_ROWS 64                /* the same for AMX, where more rows share the unpacking */
#define TILE_ROWS 16               /* that AMX multiplies at once */
#define LATER_ROWS (TILE_ROWS - 1) /* that AMX reads after the last one; their sums are not used */
#define TINY 1e-30f                /* a step whose largest input is not above counts as zeros */

/* STEP inputs of a row, rounded to 8 bits, and the sums of their integers: of the first half, the second, and both.
 * ``scaled_sums``: these times the scale. ``starts``: these times minus the zero point of weights that store none.
 * ``pairs``, with AVX2: minus the center of the weights times the sums of even and odd pairs, in 16 bits each. */
typedef struct {
    int8_t integers[STEP];
    float scale, sums[3], scaled_sums[3];
    int32_t starts[3], pairs[3];
} Rounded;
/* The same of TILE_ROWS rows. */
typedef struct { float scale[TILE_ROWS], sums[TILE_ROWS], scaled_sums[TILE_ROWS]; } TileRows;
#define SUM_OF(parts, part) ((parts) == 1 ? (size_t)2 : (part))

typedef struct {
    const float* x;
    const uint8_t* weight;                /* [tiles, steps, STEP_BYTES] */
    const float* scales;                  /* [tiles, scales_of_output, COLUMNS] */
    const uint8_t* zeros;                 /* [tiles, groups, COLUMNS]; NULL: MIDDLE, or none if there are offsets */
    const float* offsets;                 /* as scales, or NULL */
    const int8_t *subscales, *suboffsets; /* [tiles, groups, COLUMNS], or NULL */
    const uint8_t* table;                 /* [ENTRIES], integers of 8 bits that those of 4 bits choose among; or NULL */
    float* out;
    Rounded* rounded;    /* [rows, steps], for AMX [rows + LATER_ROWS, steps] */
    TileRows* tile_rows; /* [rows / TILE_ROWS, steps], for AMX */
    size_t rows, inner, width, bits, wide, steps, groups, parts_of_group, scales_of_output, groups_of_scale;
} Call;

/* Round row ``row``. */
typedef void RoundRow(const Call* call, size_t row);
/* Compute rows from ``row`` to ``end`` of the tiles from ``first`` to ``last``. */
typedef void Rows(const Call* call, size_t first, size_t last, size_t row, size_t end);
/* Compute them by ``blocks``, which gets the bits of a weight, and whether they choose among a table, as constants. */
#define ROWS_BY(blocks)                                           \
    if (call->table) {                                            \
        blocks(call, first, last, row, end, 4, 1);                \
        return;                                                   \
    }                                                             \
    switch (call->bits) {                                         \
        case 4: blocks(call, first, last, row, end, 4, 0); break; \
        case 5: blocks(call, first, last, row, end, 5, 0); break; \
        case 6: blocks(call, first, last, row, end, 6, 0); break; \
        case 8: blocks(call, first, last, row, end, 8, 0); break; \
    }

/* Fill in what follows from the sums of the two halves and the scale. */
static inline void complete(const Call* call, Rounded* rounded) {
    const float zero = call->zeros || call->offsets ? 0.0f : MIDDLE(call->wide);
    rounded->sums[2] = rounded->sums[0] + rounded->sums[1];
    for (int i = 0; i < 3; i++) {
        rounded->scaled_sums[i] = rounded->sums[i] * rounded->scale;
        rounded->starts[i] = (int32_t)(-zero * rounded->sums[i]);
    }
}

#define INLINE __attribute__((always_inline)) static inline
#define UNROLL _Pragma("GCC unroll 8") /* else arrays of vectors do not stay in registers */
#define LANES_OF(type, x) ((x) - (type){0})

INLINE uint32_t load_word(const int8_t* at) {
    uint32_t word;
    memcpy(&word, at, sizeof(word));
    return word;
}

#endif
