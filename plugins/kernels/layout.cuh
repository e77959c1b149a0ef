// Where a token of a linear attention layer has its parts, in three orders: as projected, in the ring of recent tokens,
// and in the workspace.
#pragma once

// A kind of recurrence: the size of a key, whether each key channel has a decay, whether it follows the delta rule.
template <int KEY_DIM, bool CHANNELS, bool RULE>
struct KindOf {
    static constexpr int KD = KEY_DIM, DECAYS = CHANNELS ? KEY_DIM : 1;
    static constexpr bool PER_CHANNEL = CHANNELS, DELTA = RULE;
};

template <int D>
using DeltaRule = KindOf<D, false, true>;
template <int D>
using ChannelDecays = KindOf<D, true, true>;
template <int D>
using Gated = KindOf<D, false, false>;

// Columns of a part among the projected ones: its values of key head h begin at `first` + h * `stride`.
struct Part { int first, stride; };

enum { QUERY, KEY, VALUE, DECAY, UPDATE, GATE, PARTS };

template <class Kind>
struct Layout {
    int key_heads, value_heads, value_dim, given_pitch;
    Part given[PARTS];  // in a row of `given_pitch` values; without the delta rule there is no update

    __device__ int shared() const { return value_heads / key_heads; }  // value heads of a key head
    __device__ int keys() const { return key_heads * Kind::KD; }
    __device__ int values() const { return value_heads * value_dim; }
    __device__ int channels() const { return 2 * keys() + values(); }

    // In the ring: the channels of the convolution in the order that they are projected in, then decays and updates.
    __device__ bool values_first() const { return given[VALUE].first < given[KEY].first; }
    __device__ int ring_query() const { return values_first() ? values() + keys() : 0; }
    __device__ int ring_key() const { return values_first() ? values() : keys(); }
    __device__ int ring_value() const { return values_first() ? 0 : 2 * keys(); }
    __device__ int ring_decay() const { return channels(); }
    __device__ int ring_update() const { return channels() + value_heads * Kind::DECAYS; }
    __device__ int width() const { return ring_update() + (Kind::DELTA ? value_heads : 0); }

    __device__ int given_at(int part, int each, int i) const {  // value i of a part with `each` values per key head
        return given[part].first + i / each * given[part].stride + i % each;
    }
    __device__ int given_column(int i) const {  // of a column of the ring
        int of_values = shared() * value_dim;
        if (i >= ring_update()) return given_at(UPDATE, shared(), i - ring_update());
        if (i >= ring_decay()) return given_at(DECAY, shared() * Kind::DECAYS, i - ring_decay());
        if (i >= ring_value() && i < ring_value() + values()) return given_at(VALUE, of_values, i - ring_value());
        if (i >= ring_key() && i < ring_key() + keys()) return given_at(KEY, Kind::KD, i - ring_key());
        return given_at(QUERY, Kind::KD, i - ring_query());
    }

    // In the workspace, whose rows and parts that are copied at once are aligned to 16 bytes.
    __device__ int query() const { return 0; }
    __device__ int key() const { return keys(); }
    __device__ int value() const { return 2 * keys(); }
    __device__ int decay() const { return channels(); }
    __device__ int rate() const { return channels() + value_heads * Kind::DECAYS; }
    __device__ int key_query() const { return rate() + value_heads; }
    __device__ int pitch() const { return (key_query() + key_heads + 3) / 4 * 4; }
};
