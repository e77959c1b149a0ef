// Calls of the kernels, for Python.
#pragma once

typedef void MatmulKernel(const void*, const void*, const void*, const void*, int, int, int, int, void*);
typedef void WeightsKernel(const void*, const void*, const void*, int, int, int, void*);

// A kernel of addresses and integers, which a CPU passes alike, and four floats, which it passes elsewhere.
template <size_t... I>
void call_with(void* kernel, const std::vector<u64>& numbers, const std::vector<float>& floats,
               std::index_sequence<I...>) {
    using Kernel = void(decltype(I, u64())..., float, float, float, float);
    reinterpret_cast<Kernel*>(kernel)(numbers[I]..., floats[0], floats[1], floats[2], floats[3]);
}
extern "C" void call(void* kernel, const u64* numbers, const float* floats, int x, int y, int z, int threads,
                     int shared) {
    std::vector<u64> all(numbers, numbers + 32);
    std::vector<float> scales(floats, floats + 4);
    auto run = [=] { call_with(kernel, all, scales, std::make_index_sequence<32>()); };
    launch({static_cast<u32>(x), static_cast<u32>(y), static_cast<u32>(z)}, 1, threads, shared, run);
}

extern "C" void allow(const char* from, size_t size) { readable.push_back({from, from + size}); }
extern "C" void forget() { readable.clear(); }

extern "C" void matmul(MatmulKernel* kernel, const void* x, const void* weight, const void* scales, const void* more,
                       int rows, int width, int inner, int shift, void* out, int tiles, int blocks, int shared) {
    auto run = [=] { kernel(x, weight, scales, more, rows, width, inner, shift, out); };
    launch({1, static_cast<u32>(tiles)}, blocks, 256, shared, run);
}

extern "C" void weights(WeightsKernel* kernel, const void* weight, const void* scales, const void* more, int width,
                        int inner, int shift, void* out, int blocks) {
    auto run = [=] { kernel(weight, scales, more, width, inner, shift, out); };
    launch({static_cast<u32>(blocks), 1}, 1, 256, 0, run);
}
