// Which run of prompts, and which of its row tiles, a thread block has.
#pragma once

#include "elements.cuh"

// Tile `number` of all runs that have tokens, with `rows` rows per tile: its run, or -1 after the last tile, and its
// index among the run's tiles. All threads of a warp call it together; each examines one run at a time.
struct RunTile { int run, tile; };
__device__ inline RunTile tile_of(const int* starts, int runs, int group, int rows, int number) {
    int lane = threadIdx.x % 32, before = 0;
    for (int base = 0; base < runs; base += 32) {
        int run = base + lane, lines = run < runs ? (starts[run + 1] - starts[run]) * group : 0;
        int up_to = (lines + rows - 1) / rows;
        for (int distance = 1; distance < 32; distance *= 2) {
            int other = __shfl_up_sync(0xffffffffu, up_to, distance);
            if (lane >= distance) up_to += other;
        }
        u32 reached = __ballot_sync(0xffffffffu, before + up_to > number);
        if (reached) {
            int found = __ffs(reached) - 1;
            // In reverse: those with the most keys start first.
            return {base + found, before + __shfl_sync(0xffffffffu, up_to, found) - 1 - number};
        }
        before += __shfl_sync(0xffffffffu, up_to, 31);
    }
    return {-1, 0};
}
