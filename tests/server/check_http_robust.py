#!/usr/bin/env python3
"""Clients that are rude, broken or gone: requests that two parsers could read differently, bodies
that never end, readers that do not read, clients that leave, idle connections by the hundred.
    check_http_robust.py SIDEPATH [CHECK..]"""

import collections
import http.client
import json
import random
import resource
import select
import signal
import socket
import sys
import threading
import time

import serving
from serving import ADAPTERS, complete, get, post, run_checks, until


def raw(server, data, seconds=10, silence=0.3):
    """All that comes back for these bytes, until the server closes or is silent for so long."""
    with server.connect() as sock:
        sock.sendall(data)
        answer = b""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if not select.select([sock], [], [], silence)[0]:
                break
            try:
                part = sock.recv(65536)
            except ConnectionResetError:
                break
            if not part:
                break
            answer += part
        return answer


def statuses(answer):
    return [int(part[:3]) for part in answer.split(b"HTTP/1.1 ")[1:]]


HELLO = b"GET /health HTTP/1.1\r\nHost: x\r\n"
SMUGGLED = b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"


def check_smuggling(binary):
    """None of these may be answered twice, or with a 200."""
    chunked = b"Transfer-Encoding: chunked\r\n"
    attempts = [
        HELLO + b"Content-Length: 5\r\n" + chunked + b"\r\n0\r\n\r\n" + SMUGGLED,
        HELLO + chunked + b"Content-Length: 5\r\n\r\n0\r\n\r\n" + SMUGGLED,
        HELLO + b"Content-Length: 0\r\nContent-Length: 40\r\n\r\n" + SMUGGLED,
        HELLO + b"Content-Length: 0, 40\r\n\r\n" + SMUGGLED,
        HELLO + b"Content-Length: +0\r\n\r\n" + SMUGGLED,
        HELLO + b"Content-Length: -1\r\n\r\n" + SMUGGLED,
        HELLO + b"Content-Length: 0x5\r\n\r\n" + SMUGGLED,
        HELLO + b"Content-Length: 99999999999999999999999\r\n\r\n" + SMUGGLED,
        HELLO + b"Content-Length : 5\r\n\r\n" + SMUGGLED,
        HELLO + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n" + SMUGGLED,
        HELLO + b"Transfer-Encoding: identity\r\n\r\n" + SMUGGLED,
        HELLO + b"Transfer-Encoding: \x0bchunked\r\n\r\n0\r\n\r\n" + SMUGGLED,
        HELLO + chunked + chunked + b"\r\n0\r\n\r\n" + SMUGGLED,
        HELLO + b"Host: y\r\n\r\n" + SMUGGLED,
        HELLO + b"X: a\x01b\r\n\r\n" + SMUGGLED,
        HELLO + b"X: a\x7fb\r\n\r\n" + SMUGGLED,
        b"GET /health HTTP/1.1\r\n\r\n" + SMUGGLED,
        POST + chunked + b"\r\n-1\r\n{}\r\n0\r\n\r\n" + SMUGGLED,
        POST + chunked + b"\r\nfffffffffffffffff\r\n{}\r\n0\r\n\r\n" + SMUGGLED,
        POST + chunked + b"\r\nzz\r\n{}\r\n0\r\n\r\n" + SMUGGLED,
    ]
    with serving.serving(binary) as server:
        # A second request before the first is answered is not answered; see HTTP.md.
        for hidden in (b"\r\n", b": x\r\n", b"\0: x\r\n", b"\0\r\n"):
            answer = raw(server, HELLO + hidden + SMUGGLED)
            assert statuses(answer) == [200] and b"Connection: close" in answer, (hidden, answer)
        with server.connect() as sock: # one after the other they share the connection
            for _ in range(3):
                sock.sendall(HELLO + b"\r\n")
                assert statuses(sock.recv(65536)) == [200]
        for attempt in attempts:
            answer = raw(server, attempt, seconds=3)
            # The library writes the head of one of its own refusals twice; it closes behind it.
            assert set(statuses(answer)) <= {400, 413}, (attempt, answer)
            assert b'"object"' not in answer, (attempt, answer)
        body = b'{"model": "base", "prompt": "a", "max_tokens": 1}'
        chunk = b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
        whole = POST + chunked + b"Connection: close\r\n\r\n" + chunk
        assert statuses(raw(server, whole, 60, 60)) == [200]


def mutate(rng, data):
    """Bytes changed, left out, doubled, or the end cut off."""
    data = bytearray(data)
    for _ in range(rng.randrange(1, 6)):
        at = rng.randrange(len(data) + 1)
        kind = rng.randrange(5)
        if kind == 0:
            data[at:at + 1] = bytes([rng.randrange(256)])
        elif kind == 1:
            del data[at:at + rng.randrange(1, 9)]
        elif kind == 2:
            data[at:at] = data[max(0, at - rng.randrange(1, 40)):at]
        elif kind == 3:
            data[at:at] = rng.choice([b"\0", b"\r\n", b"\r\n\r\n", b": ", b"%00", b"\xff\xfe",
                                      b"9" * 20, b"{" * 50, b"\"", b"Content-Length: 3\r\n"])
        else:
            del data[at:]
    return bytes(data)


def check_garbage(binary):
    """Requests with random damage, in headers and bodies: whatever comes back is a whole answer,
    and the server goes on."""
    rng = random.Random(1)
    body = json.dumps({"model": "base", "prompt": ["a", "b"], "max_tokens": 1, "stop": ["x"],
                       "logit_bias": {"5": 1}, "stream": False}).encode()
    chat = json.dumps({"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}).encode()
    seeds = [POST + b"Content-Length: %d\r\n\r\n" % len(body) + body,
             POST + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n" % len(body) + body +
             b"\r\n0\r\n\r\n",
             POST.replace(b"/completions", b"/chat/completions") +
             b"Content-Length: %d\r\n\r\n" % len(chat) + chat,
             HELLO + b"Authorization: Bearer x\r\n\r\n",
             b"GET /v1/models/base%2Fx?a=b HTTP/1.1\r\nHost: x\r\n\r\n"]
    counts = collections.Counter()
    with serving.serving(binary, "--no-access-log") as server:
        for _ in range(4):
            socks = []
            for _ in range(150):
                sock = server.connect()
                sock.sendall(mutate(rng, rng.choice(seeds)))
                sock.shutdown(socket.SHUT_WR)
                socks.append(sock)
            for sock in socks:
                answer = b""
                try:
                    while part := sock.recv(65536):
                        answer += part
                except ConnectionError:
                    pass
                sock.close()
                for status in statuses(answer):
                    assert 200 <= status < 500, answer
                    counts[status] += 1
        assert complete(server, "base", max_tokens=2)
        until(lambda: get(server, "/health").status == 200)
    assert counts[400] > 60 and counts[200] > 0, counts


def check_limits(binary):
    with serving.serving(binary, "--body-bytes-max", 4096, "--header-bytes-max", 8192,
                         "--receive-timeout", 1, "--idle-timeout", 2) as server:
        # Said by the header, before a byte of the body is sent.
        answer = raw(server, POST + b"Content-Length: 5000\r\n\r\n")
        assert statuses(answer) == [413] and b"body-too-large" in answer
        chunk = b"1000\r\n" + b" " * 4096 + b"\r\n"
        chunked = POST + b"Transfer-Encoding: chunked\r\n\r\n"
        assert statuses(raw(server, chunked + chunk * 2 + b"0\r\n\r\n")) == [413]
        assert statuses(raw(server, chunked + chunk * 40 + b"0\r\n\r\n")) in ([], [413])
        assert statuses(raw(server, HELLO + b"X: " + b"a" * 60000 + b"\r\n\r\n")) in ([431], [413])
        # A body, or a header, that trickles.
        for beginning in (POST + b"Content-Length: 100\r\n\r\n{", HELLO):
            with server.connect() as sock:
                sock.sendall(beginning)
                start = time.monotonic()
                while time.monotonic() - start < 20:
                    try:
                        sock.sendall(b" " if beginning[:4] == b"POST" else b"X: y\r\n")
                        if select.select([sock], [], [], 0.25)[0] and not sock.recv(100):
                            break
                    except OSError:
                        break
                assert time.monotonic() - start < 10
        assert complete(server, "base", max_tokens=2)


def check_giant_prompts(binary):
    """Prompts that cannot fit are refused by name on every route, and others are
    served meanwhile."""
    size = 8 << 20
    texts = ["a" * size, "the cat and " * (size // 12), "e\u0301" * (size // 3),
             "\u0301\u0316" * (size // 4), "\u4e2d" * (size // 3)]
    with serving.serving(binary, "--body-bytes-max", 64 << 20) as server:
        listed = get(server, "/v1/models").json["data"][0]["max_model_len"]
        for text in texts:
            bodies = [("/v1/completions", {"prompt": text}), ("/tokenize", {"prompt": text}),
                      ("/v1/chat/completions", {"messages": [{"role": "user", "content": text}]})]
            for path, body in bodies:
                with server.connect() as sock:
                    sock.sendall(bytes_of(body).replace(b"/v1/completions", path.encode(), 1))
                    assert get(server, "/health").status == 200
                    answer = http.client.HTTPResponse(sock)
                    answer.begin()
                    error = json.loads(answer.read())["error"]
                assert answer.status == 400, (path, answer.status, error)
                assert error["code"] == "too-many-tokens", (path, error)
                assert error["param"] == "prompt" and "--max-context" in error["message"], error
                taken = 8 * listed if path == "/tokenize" else listed
                assert "more than %d tokens" % taken in error["message"], (path, error)
        # More than the context can be counted, and only there.
        long = "a b" * listed
        count = post(server, "/tokenize", {"prompt": long}).json["count"]
        assert count > listed
        assert post(server, "/v1/completions", {"prompt": long}).code == "too-many-tokens"
        assert complete(server, "base", max_tokens=2)


def bytes_of(body):
    data = json.dumps(body).encode()
    return POST + b"Content-Length: %d\r\n\r\n" % len(data) + data


LONG = {"model": "sqldoc", "prompt": "a", "max_tokens": 1500, "ignore_eos": True}


def references(server):
    listed = get(server, "/v1/lora_adapters").json["data"]
    return sum(a["references"] for a in listed if "references" in a)


def check_clients_that_leave(binary):
    """A request whose client is gone leaves the batch and lets go of its adapter: in a stream,
    while it waits for the whole answer, and while it is queued behind others."""
    with serving.serving(binary, "--adapter-dir", ADAPTERS, "--max-running", 2) as server:
        for stream in (True, False):
            socks = [server.connect() for _ in range(4)]
            for sock in socks:
                sock.sendall(bytes_of({**LONG, "stream": stream}))
            until(lambda: references(server) == 4)
            if stream:
                assert socks[0].recv(10)
            for sock in socks:
                sock.close()
            until(lambda: references(server) == 0, 5, "the end of requests without a client")
        # Half of a close counts as one.
        with server.connect() as sock:
            sock.sendall(bytes_of(LONG))
            until(lambda: references(server) == 1)
            sock.shutdown(socket.SHUT_WR)
            until(lambda: references(server) == 0, 5, "the end of a half-open client")
        assert complete(server, "sqldoc")
        log = [line for line in server.access_log() if line["path"] == "/v1/completions"]
        assert sum(not line["whole"] for line in log) == 9, log


def check_slow_readers(binary):
    """A stream that nobody reads: the others go on, and it ends when its share is full."""
    with serving.serving(binary, "--adapter-dir", ADAPTERS, "--send-timeout", 300) as server:
        quiet = complete(server, "csource", "int", 60)
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect(server.address)
        sock.sendall(bytes_of({**LONG, "stream": True, "n": 60, "logprobs": 20,
                               "max_tokens": 1000}))
        until(lambda: references(server) > 0)
        assert complete(server, "csource", "int", 60) == quiet
        until(lambda: references(server) == 0, 300, "the end of a stream that nobody reads")
        ended = 'sidepath_requests_total{outcome="slow_reader"} 1'
        assert ended in get(server, "/metrics").bytes.decode().splitlines()
        sock.close()
        assert complete(server, "csource", "int", 60) == quiet


def check_request_timeout(binary):
    with serving.serving(binary, "--adapter-dir", ADAPTERS, "--request-timeout", 1) as server:
        long = {**LONG, "n": 32}
        answer = post(server, "/v1/completions", long)
        assert (answer.status, answer.code) == (504, "request-timeout"), answer.bytes
        # In a stream that has begun the error is the last event.
        answer = post(server, "/v1/completions", {**long, "stream": True})
        last = json.loads(answer.bytes.decode().rstrip("\n").split("\n\n")[-1][6:])
        assert answer.status == 200 and last["error"]["code"] == "request-timeout", last
        until(lambda: references(server) == 0)


def check_connections_of_one_address(binary):
    with serving.serving(binary, "--connections-per-address", 3) as server:
        socks = [server.connect() for _ in range(3)]
        for sock in socks:
            sock.sendall(HELLO + b"\r\n")
            assert sock.recv(100).startswith(b"HTTP/1.1 200")
        with server.connect() as sock:
            sock.settimeout(20)
            try:
                sock.sendall(HELLO + b"\r\n")
                assert sock.recv(100) == b""
            except ConnectionError:
                pass
        for sock in socks:
            sock.close()
        def answers():
            try:
                return get(server, "/health").status == 200
            except (ConnectionError, http.client.HTTPException):
                return False
        until(answers)


def check_idle_connections(binary):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 4096)), hard))
    with serving.serving(binary, "--connections", 1100) as server:
        socks = [server.connect() for _ in range(1000)]
        start = time.monotonic()
        assert complete(server, "base", max_tokens=4)
        assert time.monotonic() - start < 5
        for sock in socks[::7]:
            sock.sendall(HELLO + b"\r\n")
        for sock in socks[::7]:
            assert sock.recv(100).startswith(b"HTTP/1.1 200")
        # Those above the limit wait until others go.
        more = [server.connect() for _ in range(150)]
        more[-1].sendall(HELLO + b"\r\n")
        more[-1].settimeout(1)
        try:
            more[-1].recv(1)
            raise AssertionError("more connections than --connections are served")
        except TimeoutError:
            pass
        for sock in socks:
            sock.close()
        more[-1].settimeout(20)
        assert more[-1].recv(100).startswith(b"HTTP/1.1 200")
        for sock in more:
            sock.close()
        until(lambda: get(server, "/health").status == 200)


def check_shutdown(binary):
    """SIGTERM: what runs finishes, what is new is turned away; a second signal does not wait."""
    with serving.serving(binary, "--adapter-dir", ADAPTERS, "--shutdown-timeout", 600) as server:
        got = []
        body = {"model": "csource", "prompt": "int", "max_tokens": 100, "temperature": 0,
                "stream": True, "ignore_eos": True}
        thread = threading.Thread(target=lambda: got.append(
            post(server, "/v1/completions", body).events()))
        thread.start()
        until(lambda: references(server) == 1)
        with server.connect() as kept:
            kept.sendall(HELLO + b"\r\n")
            assert kept.recv(1000).startswith(b"HTTP/1.1 200")
            server.process.send_signal(signal.SIGTERM)
            until(lambda: any("finishing" in line for line in server.log))
            kept.sendall(b"GET /ready HTTP/1.1\r\nHost: x\r\n\r\n")
            assert kept.recv(1000).startswith(b"HTTP/1.1 503")
        thread.join()
        assert got[0][-1]["choices"][0]["finish_reason"] == "length"
        assert server.process.wait(timeout=20) == 0
        assert any("every request was finished" in line for line in server.log)
    with serving.serving(binary, "--adapter-dir", ADAPTERS, "--shutdown-timeout", 600) as server:
        with server.connect() as sock:
            sock.sendall(bytes_of({**LONG, "stream": True, "n": 16}))
            until(lambda: references(server) == 16)
            server.process.send_signal(signal.SIGTERM)
            until(lambda: any("finishing" in line for line in server.log))
            server.process.send_signal(signal.SIGTERM)
            assert server.process.wait(timeout=20) == 0
            assert any("cut off" in line for line in server.log)


CHECKS = [check_smuggling, check_garbage, check_limits, check_giant_prompts,
          check_clients_that_leave, check_slow_readers, check_request_timeout,
          check_connections_of_one_address, check_idle_connections, check_shutdown]

if __name__ == "__main__":
    run_checks([c for c in CHECKS if len(sys.argv) < 3 or c.__name__ in sys.argv[2:]], sys.argv[1])
