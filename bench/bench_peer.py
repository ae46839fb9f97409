#!/usr/bin/env python3
"""What a peer carries, against ucx_perftest on the same transport in the same run.
    bench_peer.py SIDEPATH BENCH_PEER_FETCH [--mb 100] [--rounds 7] [--out FILE]

One peer serves an adapter of --mb megabytes over TCP on this host. The ways take turns: all of its
tensors fetched once, ucx_perftest's bandwidth of active messages with UCX's defaults, and with the
segment sizes that Sidepath sets, in messages of 4 MiB that sum to as many bytes. Reported are the
medians, the ratios of each round, and the processor's seconds of each GB on both sides of the peer.
ucx_perftest (ucx-utils) polls without sleeping, so the machine needs two free cores."""

import argparse
import json
import os
import re
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

MESSAGE = 4 << 20
PORT = 13337


def write_adapter(folder, n_bytes):
    """q_proj of as many layers as it takes, rank 64, 4096 inputs and outputs, BF16."""
    layers = max(1, round(n_bytes / (2 * 64 * 4096 * 2)))
    header, offset = {}, 0
    for layer in range(layers):
        for factor, shape in (("A", [64, 4096]), ("B", [4096, 64])):
            name = "base_model.model.model.layers.%d.self_attn.q_proj.lora_%s.weight"
            header[name % (layer, factor)] = {"dtype": "BF16", "shape": shape,
                                              "data_offsets": [offset, offset + 64 * 4096 * 2]}
            offset += 64 * 4096 * 2
    text = json.dumps(header).encode()
    folder.mkdir()
    with open(folder / "adapter_model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        block = b"".join(struct.pack("<H", 0x3c00 + i % 500) for i in range(1 << 18))
        for at in range(0, offset, len(block)):
            file.write(block[:offset - at])
    (folder / "adapter_config.json").write_text(json.dumps({
        "peft_type": "LORA", "r": 64, "lora_alpha": 16, "target_modules": ["q_proj"],
        "task_type": "CAUSAL_LM"}))
    return offset


def start_peer(sidepath, folder):
    process = subprocess.Popen([sidepath, "peer", "--dir", str(folder), "--port", "0"],
                               stderr=subprocess.PIPE, text=True)
    for line in process.stderr:
        found = re.search(r"listening on ([0-9.]+:\d+)", line)
        if found:
            threading.Thread(target=process.stderr.read, daemon=True).start()
            return process, found.group(1)
    raise RuntimeError("the peer did not start")


def processor_seconds(pid):
    fields = Path("/proc/%d/stat" % pid).read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def perftest(n_messages, segments):
    """Bytes a second of ucx_perftest, or None where it fails."""
    environment = dict(os.environ, UCX_NET_DEVICES="lo", UCX_TLS="tcp")
    if segments:
        environment.update(UCX_TCP_TX_SEG_SIZE="64k", UCX_TCP_RX_SEG_SIZE="128k")
    common = ["ucx_perftest", "-p", str(PORT)]
    server = subprocess.Popen(common, env=environment, stdout=subprocess.DEVNULL,
                              stderr=subprocess.DEVNULL)
    try:
        time.sleep(0.5)
        out = subprocess.run(common + ["127.0.0.1", "-t", "ucp_am_bw", "-s", str(MESSAGE), "-n",
                                       str(n_messages), "-w", "2", "-f", "-v"], env=environment,
                             capture_output=True, text=True, timeout=120, check=True).stdout
        row = [line for line in out.splitlines() if re.match(r" *\d+,", line)][-1].split(",")
        return float(row[5]) * (1 << 20)
    except (subprocess.SubprocessError, IndexError, ValueError):
        return None
    finally:
        server.kill()
        server.wait()


def measure(options, folder):
    n_bytes = write_adapter(folder / "large", options.mb * 1000000)
    peer, address = start_peer(options.sidepath, folder)
    client = subprocess.Popen([options.fetch, address, "large"], stdin=subprocess.PIPE,
                              stdout=subprocess.PIPE, text=True)
    rounds = []
    for index in range(options.rounds + 1):
        before = processor_seconds(peer.pid)
        client.stdin.write("again\n")
        client.stdin.flush()
        answer = client.stdout.readline().split()
        spent = processor_seconds(peer.pid) - before
        row = {"fetch": n_bytes / float(answer[1]), "client_cpu": float(answer[2]),
               "peer_cpu": spent, "perftest": perftest(n_bytes // MESSAGE, False),
               "perftest_segments": perftest(n_bytes // MESSAGE, True)}
        if index > 0: # the first one connects, and reads what was evicted
            rounds.append(row)
    client.stdin.close()
    client.wait()
    peer.terminate()
    peer.wait()
    return n_bytes, rounds


def report(n_bytes, rounds):
    def median(key):
        values = [row[key] for row in rounds if row[key]]
        return statistics.median(values) if values else None

    def ratio(key):
        values = [row["fetch"] / row[key] for row in rounds if row[key]]
        return statistics.median(values) if values else None

    gb = n_bytes / 1e9
    return {"bench": "peer", "bytes": n_bytes, "rounds": len(rounds),
            "fetch_gb_s": median("fetch") / 1e9,
            "perftest_gb_s": (median("perftest") or 0) / 1e9,
            "perftest_segments_gb_s": (median("perftest_segments") or 0) / 1e9,
            "ratio_perftest": ratio("perftest"),
            "ratio_perftest_segments": ratio("perftest_segments"),
            "client_cpu_s_per_gb": median("client_cpu") / gb,
            "peer_cpu_s_per_gb": statistics.mean(row["peer_cpu"] for row in rounds) / gb,
            "load": os.getloadavg()[0], "cpus": os.cpu_count()}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("sidepath")
    parser.add_argument("fetch")
    parser.add_argument("--mb", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = report(*measure(options, Path(folder)))
    text = json.dumps(result, indent=1)
    print(text)
    if options.out:
        Path(options.out).write_text(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
