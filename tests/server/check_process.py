#!/usr/bin/env python3
"""Faults around the process: a log that nobody reads, signals, files that change, few descriptors.
    check_process.py SIDEPATH [CHECK..]"""

import os
import signal
import sys
import tempfile
import time
from pathlib import Path

import serving
from serving import complete, get, run_checks, until


def metric(server, series):
    """The value of one series of /metrics."""
    for line in get(server, "/metrics").bytes.decode().split("\n"):
        if line.startswith(series + " "):
            return float(line.rsplit(" ", 1)[1])
    raise AssertionError("no series " + series)


def check_unread_log(binary):
    """Standard error is a pipe that nobody reads: requests, /health and SIGTERM go on, and what was
    dropped is counted."""
    server = serving.Server(binary, "--header-bytes-max", 32768, unread=True)
    try:
        dropped = "sidepath_log_lines_dropped_total"
        for _ in range(60): # 60 lines of 28 KB: more than the pipe and the buffer hold
            assert get(server, "/" + "x" * 28000, timeout=5).status == 404
        assert metric(server, dropped) > 0
        start = time.monotonic()
        assert get(server, "/health", timeout=5).status == 200
        assert complete(server, "base", max_tokens=2)
        assert time.monotonic() - start < 5
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(timeout=10) == 0
    finally:
        server.process.kill()
        server.process.wait()


def bearer(key):
    return {"Authorization": "Bearer " + key}


def check_sighup(binary):
    """SIGHUP reads the key files again, all or none, and never ends the server, not even twice, nor
    while it drains."""
    with tempfile.TemporaryDirectory() as folder:
        keys, admin = Path(folder) / "keys", Path(folder) / "admin"
        keys.write_text("first\n")
        admin.write_text("root-1\n")
        def status(key):
            return get(server, "/v1/models", headers=bearer(key)).status
        def hang_up(said):
            n = len(server.log)
            server.process.send_signal(signal.SIGHUP)
            until(lambda: any(said in line for line in server.log[n:]), what=said)
        with serving.serving(binary, "--api-key-file", keys, "--admin-key-file", admin) as server:
            assert (status("first"), status("second")) == (200, 401)
            keys.write_text("second\n")
            admin.write_text("root-2\n")
            hang_up("read again")
            assert (status("first"), status("second")) == (401, 200)
            assert (status("root-1"), status("root-2")) == (401, 200)
            # One of the two cannot be read: neither is taken.
            keys.write_text("third\n")
            admin.write_text("# no key\n")
            hang_up("stay as they were")
            assert (status("second"), status("third"), status("root-2")) == (200, 401, 200)
            os.remove(keys)
            hang_up("stay as they were")
            assert status("second") == 200
            outcome = 'sidepath_key_reloads_total{outcome="%s"}'
            assert (metric(server, outcome % "ok"), metric(server, outcome % "failed")) == (1, 2)
    with serving.serving(binary) as server:
        hang_up("no key files")
        server.process.send_signal(signal.SIGTERM)
        server.process.send_signal(signal.SIGHUP)
        assert server.process.wait(timeout=20) == 0


CHECKS = [check_unread_log, check_sighup]

if __name__ == "__main__":
    run_checks([c for c in CHECKS if len(sys.argv) < 3 or c.__name__ in sys.argv[2:]], sys.argv[1])
