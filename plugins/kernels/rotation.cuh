// Rotary embedding: values of the first half of a head turn with those of the second.
#pragma once

__device__ inline void turn(float2& low, float2& high, float2 cosine, float2 sine) {
    float2 first = low, second = high;
    low = make_float2(first.x * cosine.x - second.x * sine.x, first.y * cosine.y - second.y * sine.y);
    high = make_float2(second.x * cosine.x + first.x * sine.x, second.y * cosine.y + first.y * sine.y);
}
