#!/usr/bin/env python3
"""What serving costs beside generating. N streams over HTTP against `sidepath generate` with the
same batch of N requests; and the time from the POST of a load to the adapter's first token.
    bench_serve.py SIDEPATH [--streams 16] [--tokens 400] [--rounds 5] [--threads 1] [--json]
                   [--model DIR --adapters N] [--device cuda]

Both run the same steps, so the difference is what the server adds: tasks, wakes, JSON, HTTP. Two
figures of that: wall seconds from the first request to the last token over the step seconds of
`generate`; and processor seconds of the whole server process over those of `generate`, without
opening the model. The client is a single thread that only reads; it runs on another processor
where there is one. The base and three adapters share the batch; --model names another model than
the demo's, with adapters a0, a1, ... in its folder `adapters`. Rounds alternate, the smallest of
each side counts, because everything else on the machine only ever adds."""

import argparse
import json
import os
import platform
import resource
import select
import socket
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests/server"))
import serving  # pylint: disable=wrong-import-position

DEMO = ["scripture", "csource", "sqldoc"]
TICKS = os.sysconf("SC_CLK_TCK")


def cpu_seconds(pid):
    fields = Path("/proc/%d/stat" % pid).read_text().rsplit(") ", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def folder_of(options):
    return options.model / "adapters" if options.model != serving.BASE else serving.ADAPTERS


def engine_flags(options):
    flags = ["--threads", str(options.threads), "--device", options.device, "--max-loras",
             str(max(len(options.models), 2) - 1), "--kv-tokens",
             str(options.streams * (options.tokens + 64))]  # both are in memory at a time
    for name in options.models[1:]:
        flags += ["--adapter", "%s=%s" % (name, folder_of(options) / name)]
    return flags


def model_of(options, i):
    return options.models[i % len(options.models)]


def adapter_of(options, i):
    name = model_of(options, i)
    return {} if name == "base" else {"adapter": name}


def run_generate(options, n, tokens):
    lines = "".join(json.dumps({"prompt": "The", "max_tokens": tokens, "ignore_eos": True,
                                **adapter_of(options, i)}) + "\n" for i in range(n))
    command = [options.sidepath, "generate", "--model", str(options.model), "--json",
               *engine_flags(options)]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    out = subprocess.run(command, input=lines, check=True, capture_output=True, text=True).stdout
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    summary = json.loads(out.splitlines()[-1])["summary"]
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    texts = [json.loads(line)["tokens"] for line in out.splitlines()[:-1]]
    return summary["times"]["step_seconds"], cpu, texts


def request_bytes(model, tokens):
    body = json.dumps({"model": model, "prompt": "The", "max_tokens": tokens, "temperature": 0,
                       "ignore_eos": True, "stream": True}).encode()
    return (b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n" % len(body)) + body


def run_streams(options, server, n, tokens):
    """Wall seconds, and processor seconds of the server, for n streams at once."""
    socks = [server.connect() for _ in range(n)]
    poll = select.poll()
    for sock in socks:
        sock.setblocking(False)
        poll.register(sock, select.POLLIN)
    by_fd = {sock.fileno(): sock for sock in socks}
    tails = dict.fromkeys(by_fd, b"")
    cpu = cpu_seconds(server.process.pid)
    start = time.monotonic()
    for i, sock in enumerate(socks):
        sock.send(request_bytes(model_of(options, i), tokens))
    while by_fd:
        for fd, _ in poll.poll():
            data = by_fd[fd].recv(1 << 16)
            assert data, "a stream was cut"
            tails[fd] = (tails[fd] + data)[-64:]
            if b"data: [DONE]\n\n" in tails[fd]:
                poll.unregister(fd)
                del by_fd[fd]
        time.sleep(0.002)  # a client that wakes for every token would compete with the server
    seconds = time.monotonic() - start
    for sock in socks:
        sock.close()
    return seconds, cpu_seconds(server.process.pid) - cpu


def measure_overhead(options):
    generate, served = [], []
    with serving.serving(options.sidepath, *engine_flags(options), "--no-access-log",
                         "--served-model-name", "base", model=options.model) as server:
        run_streams(options, server, options.streams, 20)
        for _ in range(options.rounds):
            one = run_generate(options, 1, 1)
            many = run_generate(options, options.streams, options.tokens)
            generate.append((many[0], many[1] - one[1]))
            served.append(run_streams(options, server, options.streams, options.tokens))
    tokens = options.streams * options.tokens
    best = {"generate_step_seconds": min(g[0] for g in generate),
            "generate_cpu_seconds": min(g[1] for g in generate),
            "serve_wall_seconds": min(s[0] for s in served),
            "serve_cpu_seconds": min(s[1] for s in served)}
    best["wall_ratio"] = best["serve_wall_seconds"] / best["generate_step_seconds"]
    best["cpu_ratio"] = best["serve_cpu_seconds"] / best["generate_cpu_seconds"]
    extra = best["serve_cpu_seconds"] - best["generate_cpu_seconds"]
    best["server_cpu_us_per_token"] = extra / tokens * 1e6
    best["generate_us_per_token"] = best["generate_step_seconds"] / tokens * 1e6
    return {"case": "overhead", "streams": options.streams, "tokens": options.tokens,
            "rounds": options.rounds, **best}


def first_token(server, model):
    """Seconds until the first byte of the first event."""
    start = time.monotonic()
    with socket.create_connection(server.address) as sock:
        sock.sendall(request_bytes(model, 4))
        data = b""
        while b"data: " not in data:
            data += sock.recv(4096)
    return time.monotonic() - start


def measure_load(options):
    loaded, first, unknown = [], [], []
    names = options.models[1:]
    with serving.serving(options.sidepath, "--adapter-dir", folder_of(options), "--no-access-log",
                         "--threads", options.threads, "--device", options.device,
                         "--kv-tokens", "8192", "--served-model-name", "base",
                         model=options.model) as server:
        first_token(server, "base")
        for i in range(options.rounds * 4):
            name = "n%d" % i
            start = time.monotonic()
            answer = serving.post(server, "/v1/load_lora_adapter",
                                  {"lora_name": name, "lora_path": names[0]})
            assert answer.status == 200
            loaded.append(time.monotonic() - start)
            first_token(server, name)
            first.append(time.monotonic() - start)
            serving.post(server, "/v1/unload_lora_adapter", {"lora_name": name})
        warm = [first_token(server, "base") for _ in range(20)]
        for name in names:
            unknown.append(first_token(server, name))
    middle = lambda values: sorted(values)[len(values) // 2]
    return {"case": "load", "loads": len(loaded), "post_to_answer_ms": middle(loaded) * 1e3,
            "post_to_first_token_ms": middle(first) * 1e3,
            "first_use_to_first_token_ms": middle(unknown) * 1e3,
            "base_first_token_ms": middle(warm) * 1e3}


def machine():
    names = [line.split(":", 1)[1].strip() for line in open("/proc/cpuinfo", encoding="utf-8")
             if line.startswith("model name")]
    return {"cpu": names[0] if names else platform.machine(), "processors": len(names),
            "load": os.getloadavg()[0]}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("sidepath")
    for name, default in (("streams", 16), ("tokens", 400), ("rounds", 5), ("threads", 1)):
        parser.add_argument("--" + name, type=int, default=default)
    parser.add_argument("--model", type=Path, default=serving.BASE)
    parser.add_argument("--adapters", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    names = DEMO if options.model == serving.BASE else ["a%d" % i for i in range(options.adapters)]
    options.models = ["base", *names]
    cases = [measure_overhead(options), measure_load(options)]
    if options.json:
        print(json.dumps({"bench": "serve", "cases": cases, "machine": machine()}))
        return
    for case in cases:
        print("  ".join("%s %s" % (k, "%.4g" % v if isinstance(v, float) else v)
                        for k, v in case.items()))
    print(machine())


if __name__ == "__main__":
    main()
