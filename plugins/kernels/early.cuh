// Programmatic dependent launch: kernels that begin before the one in front of them has ended (Launch, `early`). Such a
// kernel reads nothing that earlier ones write, and writes nothing, before it has waited for the one in front, which is
// complete then, and with it all before that one, since each has waited in its turn.
#pragma once

// Let the next kernel begin, if that was launched early.
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
