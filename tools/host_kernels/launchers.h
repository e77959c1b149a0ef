// Calls of the kernels of low-bit matmuls, for Python.
#pragma once

typedef void Matmul(const void*, const void*, const void*, const void*, int, int, int, int, void*);
typedef void Weights(const void*, const void*, const void*, int, int, int, void*);

extern "C" void allow(const char* from, size_t size) { readable.push_back({from, from + size}); }
extern "C" void forget() { readable.clear(); }

extern "C" void matmul(
    Matmul* kernel, const void* x, const void* weight, const void* scales, const void* more, int rows, int width,
    int inner, int shift, void* out, int tiles, int blocks, int shared
) {
    auto run = [=] { kernel(x, weight, scales, more, rows, width, inner, shift, out); };
    launch({1, static_cast<u32>(tiles)}, blocks, 256, shared, run);
}

extern "C" void weights(
    Weights* kernel, const void* weight, const void* scales, const void* more, int width, int inner, int shift,
    void* out, int blocks
) {
    auto run = [=] { kernel(weight, scales, more, width, inner, shift, out); };
    launch({static_cast<u32>(blocks), 1}, 1, 256, 0, run);
}
