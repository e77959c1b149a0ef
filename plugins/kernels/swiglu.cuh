// The product of an MLP's gate and up, which results in 16 bits round.
#pragma once

#include "elements.cuh"
#include "intrinsics.cuh"

// silu(gate) * up, within three units of float32's last place.
__device__ __forceinline__ float gated(float gate, float up) {
    return gate * reciprocal_approx(1.0f + exp2_approx(-LOG2_E * gate)) * up;
}
