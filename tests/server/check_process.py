#!/usr/bin/env python3
"""Faults around the process: a log that nobody reads, signals, files that change, few descriptors.
    check_process.py SIDEPATH [CHECK..]"""

import json
import os
import re
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from pathlib import Path

import serving
from serving import complete, get, post, run_checks, until


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


def check_unix_socket(binary):
    """--uds: the same server on a Unix socket, whose file it makes and removes; one that a killed
    server left is taken over, one that is in use is not, and what is no socket is left alone."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "http.sock"
        def ask(server):
            with server.connect() as made:
                made.sendall(b"GET /version HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
                return b"".join(iter(lambda: made.recv(65536), b""))
        killed = serving.Server(binary, "--uds", path)
        assert ask(killed).startswith(b"HTTP/1.1 200 ")
        line = serving.start_failing(binary, "--uds", path)
        assert "--uds %s" % path in line, line
        assert ask(killed).startswith(b"HTTP/1.1 200 ")
        until(lambda: [l for l in killed.access_log() if l["client"] == "unix"], 5, "its line")
        killed.process.kill()
        killed.process.wait()
        assert path.is_socket()
        with serving.serving(binary, "--uds", path) as server:
            assert ask(server).startswith(b"HTTP/1.1 200 ")
        assert not path.exists()
        path.write_text("mine")
        assert "--uds %s" % path in serving.start_failing(binary, "--uds", path)
        assert path.read_text() == "mine"
        assert "too long" in serving.start_failing(binary, "--uds", folder + "/" + "x" * 200)


def check_notify(binary):
    """A service manager is told when the server takes requests and when it ends, by a path or an
    abstract name; one that is not there is no failure."""
    with tempfile.TemporaryDirectory() as folder:
        for name in (folder + "/notify", "\0sidepath-test-%d" % os.getpid()):
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
                manager.bind(name)
                manager.settimeout(60)
                environment = dict(os.environ, NOTIFY_SOCKET=name.replace("\0", "@"))
                with serving.serving(binary, environment=environment) as server:
                    assert manager.recv(100) == b"READY=1"
                    assert get(server, "/ready").status == 200
                assert manager.recv(100) == b"STOPPING=1"
        for name in ("", "@", "relative", folder + "/none", "/" + "x" * 200):
            with serving.serving(binary, environment=dict(os.environ, NOTIFY_SOCKET=name)):
                pass


def check_slow_files(binary):
    """Every opening below --adapter-dir takes a third of a second: what is loaded and what needs no
    files does not wait, nor do lists for long; only who asks for a file does."""
    shim = Path(binary).parent / "tests" / "slow_files.so"
    if not shim.exists() or b"__asan_init" in Path(binary).read_bytes():
        print("skipped: no %s, or a sanitizer" % shim)
        sys.exit(77)
    folders = {"a%d" % i: "scripture" for i in range(3)}
    with serving.folder_of_adapters(**folders) as folder:
        (folder / "late").mkdir()
        environment = dict(os.environ, LD_PRELOAD=str(shim), SLOW_FILES_MS="300")
        with serving.serving(binary, "--adapter-dir", folder, "--request-timeout", 60,
                             "--adapter", "in=%s" % (serving.ADAPTERS / "csource"),
                             environment=environment) as server:
            want = complete(server, "in", max_tokens=4)
            answers = {}
            def ask(model, path="/v1/completions"):
                more = {} if path == "/tokenize" else {"max_tokens": 1}
                answers[model, path] = post(server, path, {"model": model, "prompt": "a", **more})
            waiting = [threading.Thread(target=ask, args=more) for more in
                       (("a0",), ("nobody",), ("a1", "/tokenize"), ("none", "/tokenize"))]
            for thread in waiting:
                thread.start()
            start = time.monotonic()
            body = {"model": "in", "prompt": "a"}
            calls = (lambda: get(server, "/health").status == 200,
                     lambda: complete(server, "in", max_tokens=4) == want,
                     lambda: post(server, "/tokenize", body).status == 200,
                     lambda: get(server, "/v1/models/in").status == 200)
            while time.monotonic() - start < 1:
                for made in calls:
                    began = time.monotonic()
                    assert made() and time.monotonic() - began < 0.28
            for thread in waiting:
                thread.join()
            assert answers["a0", "/v1/completions"].status == 200
            assert answers["nobody", "/v1/completions"].code == "model_not_found"
            assert answers["none", "/tokenize"].code == "model_not_found"
            assert answers["a1", "/tokenize"].status == 200
            def listed(path, field):
                began = time.monotonic()
                names = {m[field] for m in get(server, path).json["data"]}
                return names, time.monotonic() - began
            until(lambda: len(listed("/v1/models", "id")[0]) == 5)
            for path, field in (("/v1/models", "id"), ("/v1/lora_adapters", "name")):
                names, seconds = listed(path, field)
                assert names - {"base"} == {*folders, "in"} and seconds < 0.28, (names, seconds)
            # An unload of what is loaded is done at once, and stays so when its folder was found.
            began = time.monotonic()
            assert post(server, "/v1/unload_lora_adapter", {"lora_name": "a0"}).status == 200
            assert time.monotonic() - began < 0.28
            time.sleep(0.6)
            body = {"model": "a0", "prompt": "a"}
            assert post(server, "/v1/completions", body).code == "model_not_found"
            answer = post(server, "/v1/load_lora_adapter", {"lora_name": "a0", "lora_path": "x"})
            assert (answer.status, answer.code) == (404, "adapter-not-found")


def check_hanging_files(binary):
    """A file system that does not answer at all: its requests end by --request-timeout, and the
    server ends when it is told to."""
    shim = Path(binary).parent / "tests" / "slow_files.so"
    if not shim.exists() or b"__asan_init" in Path(binary).read_bytes():
        print("skipped: no %s, or a sanitizer" % shim)
        sys.exit(77)
    environment = dict(os.environ, LD_PRELOAD=str(shim), SLOW_FILES_MS="60000")
    with serving.serving(binary, "--adapter-dir", serving.ADAPTERS, "--request-timeout", 1,
                         environment=environment) as server:
        answer = post(server, "/v1/completions", {"model": "sqldoc", "prompt": "a"})
        assert (answer.status, answer.code) == (504, "request-timeout"), answer.bytes
        began = time.monotonic()
        assert {m["id"] for m in get(server, "/v1/models").json["data"]} == {"base"}
        assert complete(server, "base", max_tokens=2)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(timeout=20) == 0
        assert time.monotonic() - began < 5


def check_loads_of_one_name(binary):
    """64 loads of one name at once are one load: one 200, and for all others the same refusal; with
    load_inplace all of them succeed, one after the other, and with a stale generation none but the
    first."""
    def all_at_once(server, **more):
        answers = []
        body = {"lora_name": "x", "lora_path": "scripture", **more}
        threads = [threading.Thread(target=lambda: answers.append(
            post(server, "/v1/load_lora_adapter", body))) for _ in range(64)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return sorted((a.status, None if a.status == 200 else a.code) for a in answers)
    with serving.serving(binary, "--adapter-dir", serving.ADAPTERS) as server:
        assert all_at_once(server) == [(200, None)] + [(400, "name-taken")] * 63
        assert all_at_once(server, load_inplace=True) == [(200, None)] * 64
        listed = get(server, "/v1/lora_adapters").json["data"]
        generation = [a["generation"] for a in listed if a["name"] == "x"][0]
        assert all_at_once(server, load_inplace=True, expected_generation=generation) == \
            [(200, None)] + [(409, "generation-changed")] * 63
        # All of them wrong in the same way: the same code again.
        body = {"lora_name": "y", "lora_path": "."}
        codes = {post(server, "/v1/load_lora_adapter", body).code for _ in range(4)}
        assert len(codes) == 1, codes


def rewrite(file):
    """Other weights in the same bytes' place, a few pages of them."""
    with open(file, "r+b") as opened:
        opened.seek(file.stat().st_size // 2)
        opened.write(b"\x01\x3f" * 8192)


def replace(file):
    other = file.with_suffix(".new")
    other.write_bytes(file.read_bytes())
    os.rename(other, file)


CHANGES = [
    ("weights-changed", lambda file: os.truncate(file, 4096)),
    ("weights-changed", lambda file: os.truncate(file, file.stat().st_size + 1)),
    ("weights-changed", rewrite),
    ("weights-changed", os.utime),
    ("weights-replaced", replace),
    ("weights-replaced", os.remove),
]


def changed_base(binary, change, *flags):
    """What a server says of a base that is changed under it while a stream runs: the code of
    /ready, the number of tokens that the stream got, and the code of a request that comes then."""
    long = {"prompt": "The", "max_tokens": 800, "temperature": 0, "ignore_eos": True,
            "return_token_ids": True}
    with tempfile.TemporaryDirectory() as top:
        base = Path(top) / "base"
        shutil.copytree(serving.BASE, base)
        with serving.serving(binary, *flags, model=base) as server:
            quiet = [complete(server, "base", max_tokens=800, ignore_eos=True)[0]]
            stream = server.connect()
            body = json.dumps({**long, "stream": True}).encode()
            stream.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: "
                           b"application/json\r\nContent-Length: %d\r\nConnection: close\r\n"
                           b"\r\n" % len(body) + body)
            got = stream.recv(100)
            change(base / "model.safetensors")
            after = post(server, "/v1/completions", {**long, "max_tokens": 4})
            got += b"".join(iter(lambda: stream.recv(65536), b""))
            if after.status == 200:
                assert after.json["choices"][0]["token_ids"] == quiet[0][:4]
            tokens = [int(n) for part in re.findall(rb'"token_ids": \[([0-9, ]+)\]', got)
                      for n in part.split(b",")]
            assert tokens == quiet[0][:len(tokens)], "tokens of other weights"
            if "--weights-copy" not in flags:
                until(lambda: get(server, "/ready").status == 503)
            ready = get(server, "/ready")
            code = None if ready.status == 200 else ready.code
            assert metric(server, "sidepath_weights_changed") == (code is not None)
            assert get(server, "/health").status == 200

            def named():
                return any("model.safetensors" in line for line in server.log)

            if code: # the log has a thread of its own
                until(named)
            assert named() == (code is not None), server.log[-5:]
            if code:
                assert "model.safetensors" in ready.json["error"]["message"]
            return code, len(tokens), None if after.status == 200 else after.code


def check_changed_weights(binary):
    """Weights that are truncated, rewritten, replaced or removed under a running server: it lives,
    names the file, is not ready, and lets no token of other weights out."""
    for want, change in CHANGES:
        code, n, after = changed_base(binary, change)
        assert code == want, (want, code)
        if want == "weights-changed":
            assert n < 800 and after == want, (want, n, after)
        else:
            assert n == 800 and after is None, (want, n, after)


def check_copied_weights(binary):
    """With --weights-copy nothing that happens to the files matters."""
    for _, change in CHANGES[:3]:
        assert changed_base(binary, change, "--weights-copy") == (None, 800, None)


CHECKS = [check_unread_log, check_sighup, check_unix_socket, check_notify,
           check_changed_weights, check_copied_weights,
          check_slow_files, check_hanging_files, check_loads_of_one_name]


if __name__ == "__main__":
    run_checks([c for c in CHECKS if len(sys.argv) < 3 or c.__name__ in sys.argv[2:]], sys.argv[1])
