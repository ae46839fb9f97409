#!/usr/bin/env python3
"""The layers of a dense Qwen3 in torch, for comparison with `sidepath bench step --device cuda`.
    peer_torch_layers.py [--layers 36] [--rows 1,64] [--prefill 2048,8192] [--context 16]

bf16 weights of random numbers, RMSNorm and RoPE as torch has them (compiled where torch.compile
works), scaled_dot_product_attention, a dense KV cache. Decode steps are replayed as CUDA graphs;
the head is computed for every decode row and for the last row of a prefill. One JSON line a case:
median milliseconds."""

import argparse
import json
import statistics

import torch
import torch.nn.functional as F

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INNER, VOCAB = 4096, 32, 8, 128, 12288, 151936


def norm(x, weight):
    y = x.float()
    return (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6) * weight.float()).to(x.dtype)


def rotate(x, cosine, sine):
    a, b = x.float().chunk(2, -1)
    return torch.cat((a * cosine - b * sine, b * cosine + a * sine), -1).to(x.dtype)


def before_attention(x, w, cosine, sine):
    rows = x.shape[0]
    h = norm(x, w["norm"])
    q, k, v = F.linear(h, w["qkv"]).split((HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM,
                                           KV_HEADS * HEAD_DIM), -1)
    q = rotate(norm(q.view(rows, HEADS, HEAD_DIM), w["head"]), cosine, sine)
    k = rotate(norm(k.view(rows, KV_HEADS, HEAD_DIM), w["head"]), cosine, sine)
    return q, k, v.view(rows, KV_HEADS, HEAD_DIM)


def after_attention(x, attended, w):
    x = x + F.linear(attended, w["o"])
    gate, up = F.linear(norm(x, w["norm"]), w["gate_up"]).chunk(2, -1)
    return x + F.linear(F.silu(gate) * up, w["down"])


class Stack:
    """Weights, and the two passes."""

    def __init__(self, layers, compiled):
        def random(*shape):
            return torch.randn(*shape, device="cuda", dtype=torch.bfloat16) * 0.02
        self.layers = [{"qkv": random((HEADS + 2 * KV_HEADS) * HEAD_DIM, HIDDEN),
                        "o": random(HIDDEN, HEADS * HEAD_DIM),
                        "gate_up": random(2 * INNER, HIDDEN), "down": random(HIDDEN, INNER),
                        "norm": random(HIDDEN) + 1, "head": random(HEAD_DIM) + 1}
                       for _ in range(layers)]
        self.head = random(VOCAB, HIDDEN)
        self.before = torch.compile(before_attention, dynamic=False) if compiled \
            else before_attention
        self.after = torch.compile(after_attention, dynamic=False) if compiled else after_attention

    def prefill(self, x, cosine, sine):
        for w in self.layers:
            q, k, v = self.before(x, w, cosine, sine)
            y = F.scaled_dot_product_attention(
                q.transpose(0, 1)[None], k.transpose(0, 1)[None], v.transpose(0, 1)[None],
                is_causal=True, enable_gqa=True)
            x = self.after(x, y[0].transpose(0, 1).reshape(x.shape[0], -1), w)
        return F.linear(x[-1:], self.head).float()

    def decode(self, x, cosine, sine, caches):
        for w, (keys, values) in zip(self.layers, caches):
            q, k, v = self.before(x, w, cosine, sine)
            keys[:, :, -1] = k
            values[:, :, -1] = v
            y = F.scaled_dot_product_attention(q[:, :, None], keys, values, enable_gqa=True)
            x = self.after(x, y.reshape(x.shape[0], -1), w)
        return F.linear(x, self.head).float()


def angles(positions):
    frequency = 1e6 ** (-torch.arange(HEAD_DIM // 2, device="cuda") / (HEAD_DIM // 2))
    angle = positions[:, None, None].float() * frequency
    return torch.cos(angle), torch.sin(angle)


def median_ms(call, n=11):
    times = []
    for _ in range(n):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)


def time_decode(stack, rows, context):
    x = torch.randn(rows, HIDDEN, device="cuda", dtype=torch.bfloat16)
    caches = [tuple(torch.randn(rows, KV_HEADS, context, HEAD_DIM, device="cuda",
                                dtype=torch.bfloat16) for _ in range(2)) for _ in stack.layers]
    cosine, sine = angles(torch.full((rows,), context - 1, device="cuda"))
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            stack.decode(x, cosine, sine, caches)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        stack.decode(x, cosine, sine, caches)
    return median_ms(graph.replay)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--rows", default="1,64")
    parser.add_argument("--prefill", default="2048,8192")
    parser.add_argument("--context", type=int, default=16)
    parser.add_argument("--compile", action="store_true", help="norms and activations by inductor")
    options = parser.parse_args()
    with torch.inference_mode():
        stack = Stack(options.layers, options.compile)
        for rows in map(int, filter(None, options.rows.split(","))):
            print(json.dumps({"peer": "torch " + torch.__version__, "kind": "decode", "rows": rows,
                              "layers": options.layers, "compiled": options.compile,
                              "ms": time_decode(stack, rows, options.context)}), flush=True)
        for rows in map(int, filter(None, options.prefill.split(","))):
            x = torch.randn(rows, HIDDEN, device="cuda", dtype=torch.bfloat16)
            cosine, sine = angles(torch.arange(rows, device="cuda"))
            for _ in range(2):
                stack.prefill(x, cosine, sine)
            print(json.dumps({"peer": "torch " + torch.__version__, "kind": "prefill",
                              "rows": rows, "layers": options.layers,
                              "compiled": options.compile,
                              "ms": median_ms(lambda: stack.prefill(x, cosine, sine), 5)}),
                  flush=True)


if __name__ == "__main__":
    main()
