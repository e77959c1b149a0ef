/* Registers the custom operators of this library. */
#include "custom_operator.h"

extern const OwnOperator decode_attention, low_bit_int8_matmul, residual_norm, swiglu, tiled_matmul;
static const OwnOperator* const OPERATORS[] = {&decode_attention, &low_bit_int8_matmul, &residual_norm, &swiglu,
                                               &tiled_matmul};

/* Called by onnxruntime when it loads this library into the options of a session. */
__attribute__((visibility("default"))) OrtStatus* RegisterCustomOps(void* options, const OrtApiBase* base) {
    static void* domain; /* lives as long as the library, which is never unloaded */
    OrtApi api = base->get(API_VERSION);
    OrtStatus* status = NULL;
    if (api == NULL) return failure(base->get(1), "tandemrt: needs onnxruntime 1.17 or later");
    if (domain == NULL) {
        TRY(API(CREATE_DOMAIN, OrtStatus*, const char*, void**)("tandemrt", &domain));
        for (size_t i = 0; i < sizeof(OPERATORS) / sizeof(*OPERATORS); i++)
            TRY(API(ADD_OPERATOR, OrtStatus*, void*, const void*)(domain, &OPERATORS[i]->seen));
    }
    TRY(API(ADD_DOMAIN, OrtStatus*, void*, void*)(options, domain));
done:
    return status;
}
