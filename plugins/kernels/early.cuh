// Programmatic dependent launch: kernels that begin before the previous kernel has ended (Launch, `early`). Such a
// kernel reads and writes nothing that earlier kernels use before it has waited for the previous one. That one is
// complete then, and so are all kernels before it, since each has waited in turn.
#pragma once

// Let the next kernel begin, if it was launched early.
__device__ __forceinline__ void begin_next() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

__device__ __forceinline__ void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
