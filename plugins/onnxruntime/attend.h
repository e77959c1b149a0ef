/* Attention of some rows, heads of tokens that read one KV head, compiled for each kind of processor.
 * decode_attention.c defines what differs: NAME, TARGET, MULTIPLY_ADD, BROADCAST and KEEP. */

/* Return the product of a query and a key. */
TARGET INLINE float NAME(product)(const float* restrict query, const float* restrict key, size_t dim) {
    Lanes x = {0};
    for (size_t i = 0; i < dim; i += LANES) x = MULTIPLY_ADD(load(query + i), load(key + i), x);
    return ((x[0] + x[1]) + (x[2] + x[3])) + ((x[4] + x[5]) + (x[6] + x[7]));
}

/* Set the scores of ``each`` keys, 4 or 8, for ``count`` rows, with the bits of product. */
TARGET INLINE void NAME(products)(Row* rows, size_t at, const float* restrict keys, size_t dim, const int count,
                                  const int each) {
#ifdef PAIRS
    Lanes sums[TOGETHER * 4] = {{0}};
    for (size_t i = 0; i < dim; i += LANES) {
        Lanes queries[TOGETHER];
        UNROLL
        for (int t = 0; t < count; t++) queries[t] = load(rows[t].query + i);
        UNROLL
        for (int key = 0; key < each; key++) {
            Lanes part = load(keys + key * dim + i);
            if (count > 1) KEEP(part);
            UNROLL
            for (int t = 0; t < count; t++) sums[t * each + key] = MULTIPLY_ADD(queries[t], part, sums[t * each + key]);
        }
    }
    UNROLL
    for (int four = 0; four < count * each; four += 4) {
        const Lanes all = PAIRS(PAIRS(sums[four], sums[four + 1]), PAIRS(sums[four + 2], sums[four + 3]));
        *(Quarter*)(rows[four / each].weights + at + four % each) =
            __builtin_shufflevector(all, all, 0, 1, 2, 3) + __builtin_shufflevector(all, all, 4, 5, 6, 7);
    }
#else
    for (int t = 0; t < count; t++)
        for (int key = 0; key < each; key++)
            rows[t].weights[at + key] = NAME(product)(rows[t].query, keys + key * dim, dim);
#endif
}

/* Set the scores of a block of ``seen`` keys for ``count`` rows. */
TARGET INLINE void NAME(score)(Row* rows, const float* restrict keys, size_t dim, size_t seen, const int count) {
    const int each = count == 1 ? 8 : 4;
    size_t key = 0;
    for (; key + each <= seen; key += each) NAME(products)(rows, key, keys + key * dim, dim, count, each);
    for (; key < seen; key++)
        for (int t = 0; t < count; t++) rows[t].weights[key] = NAME(product)(rows[t].query, keys + key * dim, dim);
}

/* Rescale LANES * ``blocks`` sums of ``count`` rows from ``at`` on, and add their weighted values of ``keys`` keys.
 * ``count`` and ``blocks`` are constants. */
TARGET INLINE void NAME(mix)(const Row* rows, size_t at, const float* restrict values, size_t dim, size_t keys,
                             const int count, const int blocks) {
    Lanes sums[TOGETHER * 4];
    UNROLL
    for (int t = 0; t < count; t++) {
        UNROLL
        for (int i = 0; i < blocks; i++) sums[t * blocks + i] = load(rows[t].mixed + at + i * LANES) * rows[t].rescale;
    }
    values += at;
    for (size_t key = 0; key < keys; key++, values += dim) {
        UNROLL
        for (int i = 0; i < blocks; i++) {
            Lanes value = load(values + i * LANES);
            if (count > 1) KEEP(value);
            UNROLL
            for (int t = 0; t < count; t++)
                sums[t * blocks + i] = MULTIPLY_ADD(value, BROADCAST(&rows[t].weights[key]), sums[t * blocks + i]);
        }
    }
    UNROLL
    for (int t = 0; t < count; t++) {
        UNROLL
        for (int i = 0; i < blocks; i++) save(rows[t].mixed + at + i * LANES, sums[t * blocks + i]);
    }
}

/* Turn the scores of a block of ``seen`` keys into weights, and set what the sums until now are multiplied by. */
TARGET INLINE void NAME(weigh)(Row* row, size_t seen) {
    const size_t end = (seen + LANES - 1) / LANES * LANES;
    for (size_t key = seen; key < end; key++) row->weights[key] = -INFINITY;
    Lanes tops = lanes_of(row->most), total = row->total;
    for (size_t key = 0; key < end; key += LANES) {
        const Lanes each = load(row->weights + key);
        tops = choose(each > tops, each, tops);
    }
    float top = tops[0];
    for (int lane = 1; lane < LANES; lane++) top = tops[lane] > top ? tops[lane] : top;
    row->rescale = exponential_up_to_largest(lanes_of(row->most - top))[0];
    total *= row->rescale;
    for (size_t key = 0; key < end; key += LANES) {
        const Lanes each = exponential_up_to_largest(load(row->weights + key) - top);
        save(row->weights + key, each);
        total += each;
    }
    row->total = total;
    row->most = top;
}

/* Add a block of ``seen`` keys and values to ``count`` rows, a constant, that see all of them. */
TARGET INLINE void NAME(add_block)(Row* rows, const float* restrict keys, const float* restrict values, size_t dim,
                                   size_t seen, const int count) {
    NAME(score)(rows, keys, dim, seen, count);
    for (int t = 0; t < count; t++) NAME(weigh)(&rows[t], seen);
    size_t at = 0;
    if (count == 1)
        for (; at + 8 * LANES <= dim; at += 8 * LANES) NAME(mix)(rows, at, values, dim, seen, 1, 8);
    for (; at + 4 * LANES <= dim; at += 4 * LANES) NAME(mix)(rows, at, values, dim, seen, count, 4);
    for (; at < dim; at += STEP) NAME(mix)(rows, at, values, dim, seen, count, 2);
}

/* Compute some rows that read one KV head; ``item`` counts parts, then KV heads, then slots. */
TARGET static void NAME(attend)(void* work, size_t item) {
    const Call* call = work;
    const size_t dim = call->dim, window = call->sliding_window, group = call->heads / call->kv_heads;
    const size_t part = item % call->parts, slot = item / call->parts / call->kv_heads, all = group * call->query;
    const size_t kv_head = item / call->parts % call->kv_heads;
    const size_t from = all * part / call->parts, count = all * (part + 1) / call->parts - from;
    const size_t width = (call->heads + 2 * call->kv_heads) * dim;
    const size_t at = (slot * call->kv_heads + kv_head) * call->capacity * dim;
    const float *keys = call->keys + at, *values = call->values + at;
    float queries[ROWS * WIDEST];
    Row rows[ROWS];
    size_t most = 0; /* keys that a row sees */
    for (size_t t = 0; t < count; t++) {
        const size_t of_slot = (from + t) / group, head = kv_head * group + (from + t) % group;
        const size_t token = slot * call->query + of_slot, position = (size_t)call->index[slot] + of_slot;
        float* query = queries + t * dim;
        rows[t] = (Row){.query = query, .mixed = call->out + (token * call->heads + head) * dim, .most = -INFINITY};
        rows[t].first = window && position >= window ? position + 1 - window : 0;
        rows[t].end = position + 1;
        if (call->ends && call->ends[token] > (int64_t)position) rows[t].end = (size_t)call->ends[token];
        if (rows[t].end - rows[t].first > most) most = rows[t].end - rows[t].first;
        rotate(call, call->qkv + token * width + head * dim, position, query);
        for (size_t i = 0; i < dim; i++) query[i] *= call->scale;
        memset(rows[t].mixed, 0, sizeof(float) * dim);
    }
    for (size_t done = 0; done < most; done += KEYS) {
        size_t begin[ROWS], seen[ROWS]; /* of the block of each row */
        for (size_t t = 0; t < count; t++) {
            begin[t] = rows[t].first + done;
            seen[t] = begin[t] >= rows[t].end ? 0 : rows[t].end - begin[t] < KEYS ? rows[t].end - begin[t] : KEYS;
        }
        for (size_t t = 0, next; t < count; t = next) {
            const float *block_keys = keys + begin[t] * dim, *block_values = values + begin[t] * dim;
            for (next = t + 1; next < count && next < t + TOGETHER; next++)
                if (begin[next] != begin[t] || seen[next] != seen[t]) break;
            if (seen[t] == 0) continue;
            switch (next - t) {
                case 1: NAME(add_block)(&rows[t], block_keys, block_values, dim, seen[t], 1); break;
                case 2: NAME(add_block)(&rows[t], block_keys, block_values, dim, seen[t], 2); break;
                case 3: NAME(add_block)(&rows[t], block_keys, block_values, dim, seen[t], 3); break;
            }
        }
    }
    for (size_t t = 0; t < count; t++) {
        const float sum = sum_of(rows[t].total);
        for (size_t i = 0; i < dim; i++) rows[t].mixed[i] /= sum;
    }
}
