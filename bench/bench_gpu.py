#!/usr/bin/env python3
"""The engine on a GPU, as ratios in one run: steps against a copy of as many bytes and against the
same layers in torch, what adapters cost a step, tokens a second of 64 streams.
    bench_gpu.py SIDEPATH MAKE_CHECKPOINT FOLDER OUT.json [--layers 36] [--parts steps,streams]

FOLDER gets a random checkpoint of the 8B shape and 64 adapters of rank 16 on all linear maps (some
20 GB), unless it is there already. A part that fails is told and left out."""

import argparse
import json
import platform
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def run(command, **more):
    print("+", " ".join(map(str, command))[:160], flush=True)
    return subprocess.run(list(map(str, command)), check=True, capture_output=True, text=True,
                          **more).stdout


def adapter_flags(folder, n):
    flags = ["--max-loras", max(n, 1)]
    for i in range(n):
        flags += ["--adapter", "a%d=%s" % (i, folder / "adapters" / ("a%d" % i))]
    return flags


def steps(options):
    """(label, adapters, rows, prefill rows, more flags)"""
    cases = [("one adapter", 1, "1", 0, []), ("8 adapters", 8, "8,32,64", 2048, []),
             ("32 adapters", 32, "32,64", 8192, ["--step-rows", "8192"]),
             ("eager", 1, "1", 0, ["--eager"]),
             ("free", 8, "1,8,32,64", 8192, ["--step-rows", "8192", "--base-gemm", "free"])]
    found = []
    for label, n, rows, prefill, more in cases:
        out = run([options.sidepath, "bench", "step", "--model", options.folder, "--json",
                   "--device", "cuda", "--rows", rows, "--prefill", prefill,
                   *adapter_flags(options.folder, n), *more])
        found.append({"label": label, **json.loads(out)})
    return found


def torch_layers(options):
    found = []
    for compiled in ([], ["--compile"]):
        try:
            out = run([sys.executable, ROOT / "bench/peer_torch_layers.py", "--layers",
                       options.layers, *compiled], timeout=150)
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            print("torch", compiled, "failed:", str(error)[:300])
            continue
        found += [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    return found


def stream_lines(n_adapters, temperature):
    lines = []
    for i in range(64):
        line = {"prompt_tokens": [(i * 977 + t * 31) % 150000 for t in range(64)],
                "max_tokens": 192, "ignore_eos": True, "temperature": temperature, "seed": i}
        if n_adapters:
            line["adapter"] = "a%d" % (i % n_adapters)
        lines.append(json.dumps(line))
    return "\n".join(lines) + "\n"


def streams(options):
    found = []
    for n, temperature in ((0, 0), (1, 0), (8, 0), (64, 0), (0, 0.8), (8, 0.8)):
        out = run([options.sidepath, "generate", "--model", options.folder, "--device", "cuda",
                   "--json", *adapter_flags(options.folder, n)],
                  input=stream_lines(n, temperature))
        summary = json.loads(out.splitlines()[-1])["summary"]
        seconds = summary["times"]["step_seconds"]
        found.append({"adapters": n, "temperature": temperature, "step_seconds": seconds,
                      "tokens_per_second": 64 * 192 / seconds})
        found[-1]["over_base"] = found[-1]["tokens_per_second"] / next(
            f["tokens_per_second"] for f in found if f["temperature"] == temperature)
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sidepath")
    parser.add_argument("make_checkpoint")
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--adapters", type=int, default=64)
    parser.add_argument("--parts", default="steps,torch,streams")
    parser.add_argument("--commit", default="")
    options = parser.parse_args()
    if not (options.folder / "config.json").exists():
        run([options.make_checkpoint, "--preset", "8b", "--layers", options.layers, "--adapters",
             options.adapters, "--rank", "16", "--dtype", "bf16", options.folder])
    result = {"bench": "gpu", "commit": options.commit, "command": " ".join(sys.argv[1:]),
              "layers": options.layers, "machine": platform.processor()}
    for name, part in (("steps", steps), ("torch", torch_layers), ("streams", streams)):
        if name not in options.parts.split(","):
            continue
        try:
            result[name] = part(options)
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            print(name, "failed:", error, (getattr(error, "stderr", "") or "")[-600:])
        print(json.dumps({name: result.get(name)})[:6000], flush=True)
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
