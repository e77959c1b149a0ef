// short_convolution: after * (convolution(before * values) + bias), causal and per channel, over packed calls.
//
// short_convolution_<dtype>: 128 threads, two channels each, grid (tokens, ceil(channels / 256)). With `keeps` it also
//   stores the tokens of draft windows in the ring; a prompt may be longer than the ring, which it still reads.
// keep_recent_<dtype>: the same for prompts, grid (history, ceil(channels / 256), runs).

#include "runs.cuh"
#include "variants.cuh"

__device__ inline int channel_of_thread() { return 2 * (blockIdx.y * blockDim.x + threadIdx.x); }

// What the convolution reads of a token, rounded as it is stored.
template <class T>
__device__ float2 gated(const typename T::Element* row, int channels, int channel) {
    float2 before = T::load2(row + channel), value = T::load2(row + 2 * channels + channel);
    return T::rounded2(make_float2(before.x * value.x, before.y * value.y));
}

template <class T>
__device__ void short_convolution(const typename T::Element* projected, typename T::Element* recent,
                                  const typename T::Element* weight, const float* bias, const int* run_of_token,
                                  const Runs& runs, int channels, int kernel, int history, bool keeps,
                                  typename T::Element* out) {
    __shared__ Tap<T> taps[MAX_KERNEL];
    int token = blockIdx.x, number = run_of(runs, run_of_token, token), channel = channel_of_thread();
    if (number < 0) return;  // padding
    Run run(runs, number);
    i64 position = run.index + token - run.first;
    int tap = threadIdx.x;
    if (tap < kernel) {
        i64 read = position - (kernel - 1) + tap;
        taps[tap] = tap_at<T>(read, run, projected, 3 * channels, recent, channels, history);
    }
    __syncthreads();
    if (channel >= channels) return;
    float2 sum = convolved(taps, weight, bias, kernel, channel, [&](const typename T::Element* row, bool from_ring) {
        return from_ring ? T::load2(row + channel) : gated<T>(row, channels, channel);
    });
    const auto* own = projected + static_cast<i64>(token) * 3 * channels;
    float2 after = T::load2(own + channels + channel);
    T::store2(out + static_cast<i64>(token) * channels + channel, make_float2(after.x * sum.x, after.y * sum.y));
    if (keeps)
        T::store2(recent + (run.slot * history + position % history) * channels + channel,
                  gated<T>(own, channels, channel));
}

template <class T>
__device__ void keep_recent(const typename T::Element* projected, const Runs& runs, int channels, int history,
                            typename T::Element* recent) {
    Run run(runs, blockIdx.z);
    int token = run.count - history + blockIdx.x, channel = channel_of_thread();
    if (token < 0 || channel >= channels) return;
    const auto* own = projected + static_cast<i64>(run.first + token) * 3 * channels;
    T::store2(recent + (run.slot * history + (run.index + token) % history) * channels + channel,
              gated<T>(own, channels, channel));
}

#define GIVEN Runs{nullptr, write_index, nullptr, slots, starts, query, 0}
#define KERNELS(NAME, T)                                                                                               \
    extern "C" __global__ void __launch_bounds__(128) short_convolution_##NAME(                                        \
        const T::Element* projected, const T::Element* conv_weight, const float* conv_bias, const int* run_of_token,   \
        const i64* write_index, const i64* slots, const int* starts, int query, int channels, int kernel, int history, \
        int keeps, T::Element* recent, T::Element* out) {                                                              \
        short_convolution<T>(projected, recent, conv_weight, conv_bias, run_of_token, GIVEN, channels, kernel,         \
                             history, keeps, out);                                                                     \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(128)                                                                  \
        keep_recent_##NAME(const T::Element* projected, const i64* write_index, const i64* slots, const int* starts,   \
                           int query, int channels, int history, T::Element* recent) {                                 \
        keep_recent<T>(projected, GIVEN, channels, history, recent);                                                   \
    }

IF_BF16(KERNELS(bf16, Bf16))
IF_FP16(KERNELS(fp16, Fp16))
IF_FP32(KERNELS(fp32, Fp32))
