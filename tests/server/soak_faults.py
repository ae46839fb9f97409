#!/usr/bin/env python3
"""Everything that operators and clients have done to servers, at once, beside 32 streams: a log
that nobody reads, SIGHUP, weights that are replaced, idle connections without end, bodies that are
never finished, a file system that takes its time. /health answers, every answer has the bytes that
it has on a quiet server, memory is bounded, and SIGTERM drains.
    soak_faults.py SIDEPATH [SECONDS [SEED]]"""

import http.client
import json
import multiprocessing
import os
import random
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from pathlib import Path

import serving
from serving import complete, get

STREAMS = 32
MODELS = ("scripture", "csource", "sqldoc", "base")
PROMPTS = ("The", "int main", "SELECT a")
CONNECTIONS = 1024
BODIES = 150
BODY_BYTES = 8 << 20
CLIENT_BYTES = 256 << 20
HEALTH_SECONDS_MAX = 0.1
UNFINISHED = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n" \
    b"Content-Length: %d\r\n\r\n" % BODY_BYTES


def idler(out):
    """What the machine itself gives a process that waits for clients and has nothing to do."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        out.put(listener.getsockname())
        while True:
            sock, _ = listener.accept()
            with sock:
                sock.recv(1000)
                sock.sendall(b"HTTP/1.1 200 OK\r\n\r\n")


def ask(address):
    start = time.monotonic()
    with socket.create_connection(address, timeout=30) as sock:
        sock.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        answer = sock.recv(1000)
    assert answer.startswith(b"HTTP/1.1 200"), answer
    return time.monotonic() - start


def probe(addresses, stop, out):
    """Another process, so that what it measures is the server and not this program."""
    try:
        os.nice(-10)
    except OSError:
        pass
    times = [[] for _ in addresses]
    while not stop.is_set():
        for address, taken in zip(addresses, times):
            taken.append(ask(address))
        time.sleep(0.05)
    out.put([sorted(taken) for taken in times])


class Faults:
    def __init__(self, server, seed):
        self.server, self.seed = server, seed
        self.stop = threading.Event()
        self.problems = []
        self.counts = {}
        self.lock = threading.Lock()
        self.quiet = {(m, p): complete(server, m, p, 48, ignore_eos=True)[0]
                      for m in MODELS for p in PROMPTS}

    def count(self, what):
        with self.lock:
            self.counts[what] = self.counts.get(what, 0) + 1

    def stream(self, index):
        rng = random.Random(self.seed * 1000 + index)
        while not self.stop.is_set():
            model, prompt = rng.choice(MODELS), rng.choice(PROMPTS)
            connection = http.client.HTTPConnection(*self.server.address, timeout=120)
            body = {"model": model, "prompt": prompt, "max_tokens": 48, "temperature": 0,
                    "ignore_eos": True, "stream": True, "return_token_ids": True}
            connection.request("POST", "/v1/completions", json.dumps(body), serving.JSON)
            answer = serving.Answer(connection.getresponse())
            connection.close()
            if answer.status != 200:
                self.count("%d %s" % (answer.status, answer.code))
                continue
            tokens = [t for e in answer.events() for c in e["choices"] for t in c["token_ids"]]
            if tokens != self.quiet[model, prompt]:
                raise AssertionError("%s %s: %s" % (model, prompt, tokens))
            self.count("whole")

    def idle(self):
        socks = []
        while not self.stop.is_set():
            socks.append(socket.create_connection(self.server.address, timeout=30))
            self.count("idle")
            if len(socks) > CONNECTIONS + 200:
                socks.pop(0).close()
            time.sleep(0.002)
        for sock in socks:
            sock.close()

    def bodies(self):
        """Each is begun and left; what does not fit is refused."""
        socks = []
        piece = b" " * 65536
        while not self.stop.is_set():
            sock = socket.create_connection(self.server.address, timeout=30)
            sock.settimeout(0.05)
            try:
                sock.sendall(UNFINISHED)
                for _ in range(BODY_BYTES // len(piece) - 1):
                    sock.sendall(piece)
            except OSError:
                self.count("body refused")
            self.count("body")
            socks.append(sock)
            if len(socks) > BODIES:
                socks.pop(0).close()
            time.sleep(0.02)
        return socks

    def unknown(self):
        n = 0
        while not self.stop.is_set():
            n += 1
            answer = serving.post(self.server, "/v1/completions",
                                  {"model": "nobody-%d" % n, "prompt": "a", "max_tokens": 1})
            assert answer.status in (404, 503), answer.bytes
            self.count("unknown")

    def signals(self):
        while not self.stop.wait(0.5):
            self.server.process.send_signal(signal.SIGHUP)
            self.count("SIGHUP")

    def run(self, seconds, replace):
        def guarded(function, *more):
            try:
                function(*more)
            except Exception as problem:  # pylint: disable=broad-except
                self.problems.append(repr(problem))
                self.stop.set()
        work = [(self.stream, i) for i in range(STREAMS)]
        work += [(self.idle,), (self.bodies,), (self.unknown,), (self.signals,)]
        threads = [threading.Thread(target=guarded, args=more) for more in work]
        for thread in threads:
            thread.start()
        self.stop.wait(seconds / 2)
        replace()
        self.stop.wait(seconds / 2)
        self.stop.set()
        for thread in threads:
            thread.join()
        assert not self.problems, self.problems[:3]


def resident_mib(server):
    for line in open("/proc/%d/status" % server.process.pid, encoding="ascii"):
        if line.startswith("VmHWM"):
            return int(line.split()[1]) // 1024
    return 0


def drain(server):
    """SIGTERM beside half a request and a running stream: the stream ends whole."""
    half = server.connect()
    half.sendall(UNFINISHED)
    got = []
    body = {"model": "base", "prompt": "The", "max_tokens": 1000, "ignore_eos": True,
            "stream": True}
    thread = threading.Thread(target=lambda: got.append(
        serving.post(server, "/v1/completions", body).events()))
    thread.start()
    time.sleep(0.5)
    start = time.monotonic()
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(timeout=60) == 0
    thread.join()
    assert got[0][-1]["choices"][0]["finish_reason"] == "length"
    half.close()
    return time.monotonic() - start


def p99(times):
    return times[len(times) * 99 // 100]


def main():
    binary = sys.argv[1]
    seconds = float(sys.argv[2]) if len(sys.argv) > 2 else 600
    seed = int(sys.argv[3]) if len(sys.argv) > 3 else 1
    shim = Path(binary).parent / "tests" / "slow_files.so"
    environment = dict(os.environ, LD_PRELOAD=str(shim), SLOW_FILES_MS="500")
    with tempfile.TemporaryDirectory() as top:
        base = Path(top) / "base"
        keys = Path(top) / "keys"
        keys.write_text("a key\n")
        shutil.copytree(serving.BASE, base)
        server = serving.Server(binary, "--adapter-dir", serving.ADAPTERS, "--max-running", 64,
                                "--connections", CONNECTIONS, "--client-bytes-max", CLIENT_BYTES,
                                "--admin-key-file", keys, environment=environment, unread=True,
                                model=base)
        try:
            faults = Faults(server, seed)
            before = resident_mib(server)
            stop, out = multiprocessing.Event(), multiprocessing.Queue()
            other = multiprocessing.Process(target=idler, args=(out,), daemon=True)
            other.start()
            prober = multiprocessing.Process(
                target=probe, args=((server.address, out.get(timeout=60)), stop, out))
            prober.start()
            def replace():
                weights = base / "model.safetensors"
                shutil.copyfile(weights, base / "new")
                os.rename(base / "new", weights)
            faults.run(seconds, replace)
            stop.set()
            times, idle_times = out.get(timeout=60)
            prober.join()
            ready = get(server, "/ready")
            text = get(server, "/metrics").bytes.decode().splitlines()
            kept = [line for line in text if line.startswith(
                ("sidepath_log_lines_dropped", "sidepath_connections_ended",
                 "sidepath_client_bytes", "sidepath_key_reloads"))]
            after = resident_mib(server)
            drained = drain(server)
        finally:
            server.process.kill()
            server.process.wait()
        print("seed %d, %g s: %s" % (seed, seconds, dict(sorted(faults.counts.items()))))
        for what, taken in (("/health", times), ("a process without work", idle_times)):
            print("%s: %d times, median %.1f ms, p99 %.1f ms, max %.1f ms" % (
                what, len(taken), 1e3 * taken[len(taken) // 2], 1e3 * p99(taken), 1e3 * taken[-1]))
        print("/ready %d %s; most memory %d MiB, %d before; SIGTERM drained in %.1f s" %
              (ready.status, ready.code, after, before, drained))
        print("\n".join(kept))
        assert ready.code == "weights-replaced"
        assert faults.counts["whole"] > 100
        assert after - before < 2 * (CLIENT_BYTES >> 20), (before, after)
        # The idle process beside it shows what the machine itself takes, where this fails.
        assert p99(times) < HEALTH_SECONDS_MAX, (times[-5:], idle_times[-5:])


if __name__ == "__main__":
    main()
