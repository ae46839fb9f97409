#!/usr/bin/env python3
"""What publishing an adapter costs beside streams that decode.
    bench_publish.py SIDEPATH MODEL ADAPTER [--streams 64] [--seconds 10] [--device cpu]
                     [--out FILE] [-- FLAGS OF serve]

MODEL is a folder without a need of a tokenizer, ADAPTER one of its adapters. Streams run on the
adapter and on the base for the whole time; the adapter is published again and again under another
name, each time with one bit changed, through PUT. Phases: no publishes, one each second, half and
quarter of a second, and one after the other. Reported are the gaps between two tokens of a stream
as its reader sees them (a step, and what the server and the reader add), and for each publish the
time from its last byte to the answer and to the first token of the new version. The phases run
--rounds times, and the gaps of one kind are put together, so that what drifts on the machine is in
all of them. Publishing is a process of its own, so that the reader of the streams never waits for
it."""

import argparse
import http.client
import json
import multiprocessing
import os
import re
import selectors
import socket
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

BOUNDARY = "one-boundary-of-this-bench"


def start(options):
    command = [options.sidepath, "serve", "--model", str(options.model), "--port", "0",
               "--device", options.device, "--adapter", "steady=%s" % options.adapter,
               "--max-loras", "4", "--max-running", str(options.streams + 8), "--kv-tokens",
               str((options.streams + 8) * (options.tokens + 32)), "--client-bytes-max",
               str(2 << 30), "--no-access-log", *options.flags]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    for line in process.stderr:
        found = re.search(r"at http://([0-9.]+):(\d+)$", line.strip())
        if found:
            threading.Thread(target=process.stderr.read, daemon=True).start()
            return process, (found.group(1), int(found.group(2)))
    raise RuntimeError("the server did not start")


class Streams(threading.Thread):
    """Reads all streams; a gap is the time between two readings of one that had tokens. A stream
    that ends is begun anew."""

    def __init__(self, options, address):
        super().__init__(daemon=True)
        self.options, self.address = options, address
        self.selector = selectors.DefaultSelector()
        self.gaps, self.kept, self.tokens, self.stopped = [], False, 0, False
        for i in range(options.streams):
            self.begin(i)

    def begin(self, i):
        body = json.dumps({"model": "steady" if i % 2 else options_base(self.options),
                           "prompt": [100 + i, 7, 9], "max_tokens": self.options.tokens,
                           "temperature": 0, "ignore_eos": True, "stream": True,
                           "return_token_ids": True}).encode()
        made = socket.create_connection(self.address)
        made.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json"
                     b"\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        made.setblocking(False)
        self.selector.register(made, selectors.EVENT_READ, [i, None])

    def run(self):
        while not self.stopped:
            for key, _ in self.selector.select(0.2):
                data = key.fileobj.recv(1 << 16)
                now = time.perf_counter()
                n = data.count(b'"token_ids"')
                self.tokens += n
                if n and key.data[1] is not None and self.kept:
                    self.gaps.append(now - key.data[1])
                if n:
                    key.data[1] = now
                if not data or b"[DONE]" in data:
                    self.selector.unregister(key.fileobj)
                    key.fileobj.close()
                    self.begin(key.data[0])

    def keep(self, seconds, beside=None):
        """The gaps of so many seconds, and what `beside` returns meanwhile."""
        self.gaps, tokens, began = [], self.tokens, time.perf_counter()
        self.kept = True
        made = beside(began + seconds) if beside else time.sleep(seconds)
        self.kept = False
        return self.gaps, made, (self.tokens - tokens) / (time.perf_counter() - began)


def options_base(options):
    return Path(options.model).name


class Publisher:
    """Publishes the adapter under "live", each time another version of it. In a process of its own:
    `run` takes (end, pause) from a pipe and gives what came of it."""

    def __init__(self, options, address):
        self.address = address
        config = (Path(options.adapter) / "adapter_config.json").read_bytes()
        weights = (Path(options.adapter) / "adapter_model.safetensors").read_bytes()
        before = b""
        for name, data in (("config", config + b"\r\n"), ("weights", b"")):
            before += ("--%s\r\nContent-Disposition: form-data; name=\"%s\"\r\n\r\n"
                       % (BOUNDARY, name)).encode() + data
        self.body = bytearray(before + weights + ("\r\n--%s--\r\n" % BOUNDARY).encode())
        self.first = len(before) + 8 + struct.unpack("<Q", weights[:8])[0]
        self.n = 0

    def run(self, pipe):
        while True:
            wanted = pipe.recv()
            if wanted is None:
                return
            pipe.send(self.until(*wanted))

    def publish(self):
        """Seconds from the last byte to the answer and to the first token; None: try again."""
        self.n += 1
        self.body[self.first + 4 * self.n] ^= 1
        connection = http.client.HTTPConnection(*self.address, timeout=120)
        began = time.perf_counter()
        connection.request("PUT", "/v1/adapters/live", body=self.body, headers={
            "Content-Type": "multipart/form-data; boundary=" + BOUNDARY})
        sent = time.perf_counter()
        answer = connection.getresponse()
        said = json.loads(answer.read())
        answered = time.perf_counter()
        if answer.status == 503:
            return None
        assert answer.status == 200, said
        connection.request("POST", "/v1/completions", body=json.dumps({
            "model": "live", "prompt": [5, 6], "max_tokens": 1, "temperature": 0,
            "adapter_digest": said["digest"]}), headers={"Content-Type": "application/json"})
        token = connection.getresponse()
        made = json.loads(token.read())
        assert token.status == 200 and made["adapter_digest"] == said["digest"], made
        connection.close()
        return {"sent": sent - began, "answer": answered - sent,
                "first_token": time.perf_counter() - sent}

    def until(self, end, pause):
        made, busy = [], 0
        while time.perf_counter() < end:
            began = time.perf_counter()
            one = self.publish()
            made.append(one) if one else None
            busy += one is None
            time.sleep(max(0, pause - (time.perf_counter() - began)))
        return {"publishes": made, "busy": busy}


def share(values, part):
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))] if ordered else None


def of_gaps(gaps):
    return {"n": len(gaps), "p50_ms": 1e3 * share(gaps, 0.5), "p90_ms": 1e3 * share(gaps, 0.9),
            "p99_ms": 1e3 * share(gaps, 0.99), "max_ms": 1e3 * max(gaps)}


def of_publishes(made, seconds):
    done = [one for part in made for one in part["publishes"]]
    return {"n": len(done), "busy": sum(part["busy"] for part in made),
            "per_second": len(done) / seconds,
            **{"%s_ms" % name: {"p50": 1e3 * share([one[name] for one in done], 0.5),
                                "p90": 1e3 * share([one[name] for one in done], 0.9),
                                "max": 1e3 * max(one[name] for one in done)}
               for name in ("sent", "answer", "first_token")}}


def longest_step_while_loading(address):
    connection = http.client.HTTPConnection(*address, timeout=60)
    connection.request("GET", "/metrics")
    text = connection.getresponse().read().decode()
    found = re.search(r"^sidepath_step_seconds_max_while_loading (\S+)$", text, re.M)
    return 1e3 * float(found.group(1))


def measure(options, address):
    publisher = Publisher(options, address)
    pipe, other = multiprocessing.Pipe()
    process = multiprocessing.Process(target=publisher.run, args=(other,), daemon=True)
    process.start()

    def publish(end, pause):
        pipe.send((end, pause))
        return pipe.recv()

    streams = Streams(options, address)
    streams.start()
    time.sleep(options.warm)
    publish(time.perf_counter() + 0.01, 0)
    kinds = {"quiet": None, "each_second": 1.0, "each_half_second": 0.5,
             "each_quarter_second": 0.25, "one_after_the_other": 0.0}
    found = {kind: ([], [], []) for kind in kinds}
    for _ in range(options.rounds):
        for kind, pause in kinds.items():
            beside = None if pause is None else lambda end, p=pause: publish(end, p)
            gaps, made, rate = streams.keep(options.seconds / options.rounds, beside)
            found[kind][0].extend(gaps)
            found[kind][1].append(made)
            found[kind][2].append(rate)
    streams.stopped = True
    pipe.send(None)
    result = {}
    for kind, (gaps, made, rates) in found.items():
        result[kind] = {"gaps": of_gaps(gaps), "tokens_per_s": sum(rates) / len(rates)}
        if kind != "quiet":
            result[kind]["publish"] = of_publishes(made, options.seconds)
            result[kind]["p99_ratio"] = (result[kind]["gaps"]["p99_ms"] /
                                         result["quiet"]["gaps"]["p99_ms"])
    result["bytes"] = len(publisher.body)
    result["longest_step_while_loading_ms"] = longest_step_while_loading(address)
    return result


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sidepath")
    parser.add_argument("model", type=Path)
    parser.add_argument("adapter", type=Path)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=2000, help="of one stream")
    parser.add_argument("--seconds", type=float, default=10, help="of each kind, in all rounds")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--warm", type=float, default=3)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path)
    parser.add_argument("flags", nargs="*", help="further flags of serve, after --")
    options = parser.parse_args()
    process, address = start(options)
    try:
        result = measure(options, address)
    finally:
        process.terminate()
        process.wait(60)
    result.update({"streams": options.streams, "device": options.device,
                   "processors": os.cpu_count(), "seconds": options.seconds})
    text = json.dumps(result, indent=1)
    if options.out:
        options.out.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    sys.exit(main())
