#!/usr/bin/env python3
"""How long an adapter takes from the wish to load it to READY: from a folder of this host, from a
peer as tensors, and from a peer that is trusted as an image.
    bench_peer_load.py SIDEPATH MODEL ADAPTERS [--rounds 5] [--rank 64] [--out FILE]

ADAPTERS is a folder of adapters for MODEL. One peer serves it over TCP on this host; one server has
the folder and the peer, one the peer with its images. The ways take turns, so that what drifts on
the machine is in all of them; each load is of an adapter that was unloaded before, with its files
in the page cache. A stream on the base runs beside all of it: reported is the longest step beside a
load too."""

import argparse
import http.client
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path


def start(command, pattern):
    process = subprocess.Popen(list(map(str, command)), stderr=subprocess.PIPE, text=True)
    for line in process.stderr:
        found = re.search(pattern, line.strip())
        if found:
            threading.Thread(target=process.stderr.read, daemon=True).start()
            return process, found.group(1)
    raise RuntimeError("%s did not start" % command[1])


def call(address, method, path, body=None):
    connection = http.client.HTTPConnection(address, timeout=600)
    headers = {"Content-Type": "application/json"} if body is not None else {}
    connection.request(method, path, json.dumps(body) if body is not None else None, headers)
    response = connection.getresponse()
    answer = response.read()
    connection.close()
    return response.status, answer


def stream(address, stopped):
    while not stopped.is_set():
        call(address, "POST", "/v1/completions",
             {"prompt": [1, 2, 3], "max_tokens": 64, "ignore_eos": True})


def load(address, name, path):
    body = {"lora_name": name}
    if path:
        body["lora_path"] = path
    begin = time.monotonic()
    status, answer = call(address, "POST", "/v1/load_lora_adapter", body)
    seconds = time.monotonic() - begin
    assert status == 200, answer
    status, answer = call(address, "POST", "/v1/unload_lora_adapter", {"lora_name": name})
    assert status == 200, answer
    return seconds


def metric(address, name):
    text = call(address, "GET", "/metrics")[1].decode()
    found = re.findall(r"^%s(?:\{[^}]*\})? ([0-9.e+-]+)$" % name, text, re.M)
    return sum(map(float, found))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("sidepath")
    parser.add_argument("model", type=Path)
    parser.add_argument("adapters", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rank", type=int, default=64)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    names = sorted(one.name for one in options.adapters.iterdir() if one.is_dir())
    folder = Path(tempfile.mkdtemp())
    key = folder / "key"
    key.write_text("a key for this bench alone\n")
    key.chmod(0o600)
    peer, where = start([options.sidepath, "peer", "--dir", options.adapters, "--port", 0, "--pack",
                         "--model", options.model, "--max-lora-rank", options.rank,
                         "--peer-key-file", key], r"listening on (\S+)")
    common = [options.sidepath, "serve", "--model", options.model, "--port", 0, "--max-lora-rank",
              options.rank, "--max-loras", 2, "--max-running", 4, "--kv-tokens", 4096,
              "--no-access-log", "--peer", where, "--peer-key-file", key]
    pattern = r"at http://([0-9.]+:\d+)$"
    plain, here = start([*common, "--adapter-dir", options.adapters], pattern)
    trusting, there = start([*common, "--peer-trust-images", where], pattern)
    stopped = threading.Event()
    for address in (here, there):
        threading.Thread(target=stream, args=(address, stopped), daemon=True).start()
    ways = {"disk": (here, True), "tensors": (here, False), "image": (there, False)}
    seconds = {way: [] for way in ways}
    for i in range(options.rounds + 1): # the first warms
        for name in names:
            for way, (address, with_path) in ways.items():
                took = load(address, name, name if with_path else None)
                if i > 0:
                    seconds[way].append(took)
    medians = {way: statistics.median(took) for way, took in seconds.items()}
    report = {
        "bench": "peer_load", "adapter_bytes": sum(
            one.stat().st_size for one in (options.adapters / names[0]).iterdir()),
        "loads": len(seconds["disk"]),
        "seconds": {way: round(value, 4) for way, value in medians.items()},
        "worst_seconds": {way: round(max(took), 4) for way, took in seconds.items()},
        "ratio_to_disk": {way: round(value / medians["disk"], 3) for way, value in medians.items()},
        "images_taken": metric(there, "sidepath_peer_images_taken_total"),
        "longest_step_beside_a_load_seconds": {
            "disk and tensors": metric(here, "sidepath_step_seconds_max_while_loading"),
            "image": metric(there, "sidepath_step_seconds_max_while_loading")},
        "machine": {"cores": os.cpu_count(), "load": os.getloadavg()[0]},
    }
    text = json.dumps(report, indent=1)
    print(text)
    if options.out:
        options.out.write_text(text + "\n")
    stopped.set()
    for process in (plain, trusting, peer):
        process.terminate()
        process.wait()
    shutil.rmtree(folder)


if __name__ == "__main__":
    sys.exit(main())
