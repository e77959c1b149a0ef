/* Rows of low_bit_int8_matmul with NEON's products of 8 bits. */
#if defined(__aarch64__) && !defined(PORTABLE)
#include "low_bit_int8.h"

#include <arm_neon.h>

#ifdef __linux__
#include <sys/auxv.h>
#endif
#ifdef __clang__
#define DOT_PRODUCTS __attribute__((target("dotprod")))
#else
#define DOT_PRODUCTS __attribute__((target("arch=armv8.2-a+dotprod")))
#endif

int low_bit_int8_has_dot_products(void) {
#ifdef __linux__
    return getauxval(AT_HWCAP) >> 20 & 1; /* HWCAP_ASIMDDP */
#else
    return 1; /* Apple's processors have them */
#endif
}

INLINE uint32x4_t load_words(const uint8_t* at) { return vreinterpretq_u32_u8(vld1q_u8(at)); }
INLINE uint32x4_t load_table(const uint8_t* at) { return load_words(at); }
INLINE float32x4_t load_floats(const float* at) { return vld1q_f32(at); }
INLINE float32x4_t bytes_as_floats(const uint8_t* at) {
    const uint8x8_t four = vcreate_u8(load_word((const int8_t*)at));
    return vcvtq_f32_u32(vmovl_u16(vget_low_u16(vmovl_u8(four))));
}
INLINE float32x4_t integers_as_floats(const int8_t* at) {
    const int8x8_t four = vcreate_s8(load_word(at));
    return vcvtq_f32_s32(vmovl_s16(vget_low_s16(vmovl_s8(four))));
}
/* Add the products of a step's next eight inputs. 8 bits count from their middle here, and START adds it back. */
DOT_PRODUCTS INLINE uint32x4_t add_dots(uint32x4_t sums, uint32x4_t low, uint32x4_t first, uint32x4_t high,
                                        uint32x4_t second, int bits) {
    const uint32_t middle = bits == 8 ? 0x80808080 : 0;
    const int8x16_t lower = vreinterpretq_s8_u32(low ^ middle), upper = vreinterpretq_s8_u32(high ^ middle);
    int32x4_t all = vdotq_s32(vreinterpretq_s32_u32(sums), lower, vreinterpretq_s8_u32(first));
    all = vdotq_s32(all, upper, vreinterpretq_s8_u32(second));
    return vreinterpretq_u32_s32(all);
}
INLINE uint32x4_t start_of(const Rounded* rounded, size_t sum, int bits) {
    const int32_t middles = bits == 8 ? (int32_t)(MIDDLE(bits) * rounded->sums[sum]) : 0;
    return vreinterpretq_u32_s32(vdupq_n_s32(rounded->starts[sum] + middles));
}

#define NAME(function) low_bit_int8_##function##_neon
#define TARGET DOT_PRODUCTS
#define VECTOR_COLUMNS 4
#define FLOATS float32x4_t
#define WORDS uint32x4_t
#define JOIN(type, low, high) (low)
#define PREFETCH(at) __builtin_prefetch(at)
#define START(rounded, sum, bits) start_of(rounded, sum, bits)
#define LOOK_UP(table, at) vreinterpretq_u32_u8(vqtbl1q_u8(vreinterpretq_u8_u32(table), vreinterpretq_u8_u32(at)))
#define ADD_PAIR(sums, low, first, high, second, bits) add_dots(sums, low, first, high, second, bits)
#define WHOLE(sums, bits) vcvtq_f32_s32(vreinterpretq_s32_u32(sums))
#define MULTIPLY_ADD(a, b, c) vfmaq_f32(c, a, b)
#include "low_bit_int8_rows.h"
#endif
