// Calls of the kernels, for Python.
#pragma once

typedef void MatmulKernel(const void*, const void*, const void*, const void*, int, int, int, int, void*);
typedef void WeightsKernel(const void*, const void*, const void*, int, int, int, void*);

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

typedef void GateUpKernel(const void*, const void*, const void*, const void*, int, const void*, const void*,
                          const void*, int, int, int, const void*, int, float, float, float, float, void*);
typedef void DownKernel(const void*, const void*, const void*, const void*, int, const void*, const void*, const void*,
                        const void*, int, int, const void*, void*);

extern "C" void gate_up(GateUpKernel* kernel, const void* x, const void* weight, const void* scales, const void* more,
                        int shift, const void* order, const void* items, const void* count, int hidden, int width,
                        int per_token, const void* bias, int interleaved, float alpha, float cubic, float limit,
                        float offset, void* out, int blocks, int shared) {
    auto run = [=] {
        kernel(x, weight, scales, more, shift, order, items, count, hidden, width, per_token, bias, interleaved, alpha,
               cubic, limit, offset, out);
    };
    launch({static_cast<u32>(blocks), 1}, 1, 256, shared, run);
}

extern "C" void down(DownKernel* kernel, const void* x, const void* weight, const void* scales, const void* more,
                     int shift, const void* order, const void* items, const void* count, const void* shares, int hidden,
                     int width, const void* bias, void* out, int blocks, int shared) {
    auto run = [=] { kernel(x, weight, scales, more, shift, order, items, count, shares, hidden, width, bias, out); };
    launch({static_cast<u32>(blocks), 1}, 1, 256, shared, run);
}
