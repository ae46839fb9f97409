#!/usr/bin/env python3
"""The expert GEMMs of bench_cuda_moe through torch._grouped_mm, for comparison in one run.

Prints one JSON object in the units of that bench: microseconds of one call by graph replay, with
cold weights (four calls with memory of their own in a graph, 128 MiB written before each replay).
Rows are sorted by expert before; that is not timed.
"""
import json
import statistics
import sys

import torch

EXPERTS, TOP_K, HIDDEN, INNER, CALLS = 128, 8, 2048, 768, 4


def rows_of(tokens, seed):
    """Ends of each expert's rows, for random distinct experts of each token."""
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.rand(tokens, EXPERTS, generator=generator).topk(TOP_K).indices
    counts = torch.bincount(chosen.flatten(), minlength=EXPERTS)
    return counts.cumsum(0).to(torch.int32).cuda()


def replay(call, flush, replays):
    for _ in range(2):
        for i in range(CALLS):
            call(i)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(CALLS):
            call(i)
    times = []
    for _ in range(replays):
        flush.zero_()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1000 / CALLS)
    return round(statistics.median(times), 1)


def main():
    replays = int(sys.argv[1]) if len(sys.argv) > 1 else 20
    flush = torch.empty(128 << 20, dtype=torch.uint8, device="cuda")
    weights = {
        name: [torch.randn(EXPERTS, n, k, dtype=torch.bfloat16, device="cuda") * 0.05
               for _ in range(CALLS)]
        for name, n, k in (("gate_up", 2 * INNER, HIDDEN), ("down", HIDDEN, INNER))
    }
    cells = []
    for tokens in (1, 16, 64, 512, 2048):
        cell = {"tokens": tokens}
        ends = [rows_of(tokens, i) for i in range(CALLS)]
        for name, k in (("gate_up", HIDDEN), ("down", INNER)):
            x = [torch.randn(tokens * TOP_K, k, dtype=torch.bfloat16, device="cuda")
                 for _ in range(CALLS)]

            def call(i, name=name, x=x):
                return torch._grouped_mm(x[i], weights[name][i].transpose(1, 2), offs=ends[i])

            cell[name] = replay(call, flush, replays)
        cells.append(cell)
        print(json.dumps(cell), file=sys.stderr, flush=True)
    print(json.dumps({"peer": "torch._grouped_mm", "torch": torch.__version__, "unit": "us",
                      "cells": cells}))


if __name__ == "__main__":
    main()
