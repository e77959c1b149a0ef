// verify_draft in one launch without a workspace, for runtimes that start a single kernel per operator. One block per
// request handles its rows in turn, and stops where its run ends. It is slower than verify.cu and gives the same
// tokens.
//
// A file that includes this one names the kernels that it needs: VERIFY_DRAFT(bf16, bf16), VERIFY_DRAFT_PROBS(fp32,
// float). Parameters are inputs in the order of the contract, int32 scalars, outputs.
#pragma once
#include "accept.cuh"

// Grid (batch), 1024 threads. `draft_probs` may be null.
template <class T>
__device__ __forceinline__ void verify_one(const T* logits, const i64* draft_tokens, const i64* draft_len,
                                           const Sampling& sampling, const float* draft_probs, int rows, int vocab,
                                           i64* tokens, i64* count) {
    __shared__ Histogram histogram;
    int item = blockIdx.x;
    Request request(sampling, item, vocab);
    Drafts drafts(draft_tokens, draft_len, draft_probs, item, rows, vocab);
    int accepted = 0, token = -1;
    for (;; accepted++) {
        Row<T> row(logits, nullptr, i64(item) * rows + accepted, vocab);
        Distribution dist = {{1.0, 0.0f, -INFINITE, 0, 0}, request.temperature, request.filtered};
        if (request.filtered || request.by_rejection) {
            count_values(row, 0, row.groups(), histogram);
            dist = row_distribution(row, request, request.by_rejection, histogram);
        }
        bool drafted = accepted < drafts.length, refused = request.by_rejection && drafted, empty;
        if (refused) judge(row, request, drafts, accepted, dist);
        if (dist.stats.stands) continue;
        int last = row.groups();
        typename Row<T>::Incoming next = row.fetch(threadIdx.x, last);
        token = part_winner(row, request, dist, drafts, accepted, refused, SAMPLE, 0, last, next, empty).token;
        if (refused || !drafted || token < 0 || token != drafts.tokens[accepted]) break;
    }
    if (threadIdx.x >= 32) return;
    emit(drafts.of_lane(), rows, accepted, token, tokens + i64(item) * rows);
    if (threadIdx.x == 0) count[item] = accepted + (token >= 0);
}

#define VERIFY_INPUTS(T) const T *logits, const i64 *draft_tokens, const i64 *draft_len, SAMPLING_PARAMETERS

#define VERIFY_DRAFT(NAME, T)                                                                       \
    extern "C" __global__ void __launch_bounds__(1024)                                              \
        verify_draft_##NAME(VERIFY_INPUTS(T), int rows, int vocab, i64* tokens, i64* count) {       \
        verify_one(logits, draft_tokens, draft_len, SAMPLING, nullptr, rows, vocab, tokens, count); \
    }

#define VERIFY_DRAFT_PROBS(NAME, T)                                                                     \
    extern "C" __global__ void __launch_bounds__(1024) verify_draft_probs_##NAME(                       \
        VERIFY_INPUTS(T), const float* draft_probs, int rows, int vocab, i64* tokens, i64* count) {     \
        verify_one(logits, draft_tokens, draft_len, SAMPLING, draft_probs, rows, vocab, tokens, count); \
    }
