#!/usr/bin/env python3
"""Clients that are rude, broken or gone: requests that two parsers could read differently, bodies
that never end, readers that do not read, clients that leave, idle connections by the hundred.
    check_http_robust.py SIDEPATH [CHECK..]"""

import collections
import http.client
import json
import random
import re
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
    return raw_until_end(server, data, seconds, silence)[0]


def raw_until_end(server, data, seconds=10, silence=0.3):
    """The same, and whether the server closed."""
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
                return answer, True
            if not part:
                return answer, True
            answer += part
        return answer, False


def statuses(answer):
    return [int(part[:3]) for part in answer.split(b"HTTP/1.1 ")[1:]]


HELLO = b"GET /health HTTP/1.1\r\nHost: x\r\n"
SMUGGLED = b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"


def check_smuggling(binary):
    """Requests that two parsers could read differently, each with another one in the same bytes:
    one answer, in JSON, and the connection closes."""
    chunked = b"Transfer-Encoding: chunked\r\n"
    attempts = [
        HELLO + b"Content-Length: 5\r\n" + chunked + b"\r\n0\r\n\r\n",
        HELLO + chunked + b"Content-Length: 5\r\n\r\n0\r\n\r\n",
        HELLO + b"Content-Length: 0\r\nContent-Length: 40\r\n\r\n",
        HELLO + b"Content-Length: 0, 40\r\n\r\n",
        HELLO + b"Content-Length: +5\r\n\r\n",
        HELLO + b"Content-Length: -5\r\n\r\n",
        HELLO + b"Content-Length: 0x5\r\n\r\n",
        HELLO + b"Content-Length: \r\n\r\n",
        HELLO + b"Content-Length: 99999999999999999999\r\n\r\n",
        HELLO + b"Content-Length : 5\r\n\r\n",
        HELLO + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
        HELLO + b"Transfer-Encoding: identity\r\n\r\n",
        HELLO + b"Transfer-Encoding: \x0bchunked\r\n\r\n0\r\n\r\n",
        HELLO + chunked + chunked + b"\r\n0\r\n\r\n",
        HELLO + b"Host: y\r\n\r\n",
        HELLO + b"X: a\x01b\r\n\r\n",
        HELLO + b"X: a\x7fb\r\n\r\n",
        HELLO + b"X: a\0b\r\n\r\n",
        HELLO + b"X: a\rb\r\n\r\n",
        HELLO + b"X: a\nContent-Length: 40\r\n\r\n",
        HELLO + b"X: a\r\n folded\r\n\r\n",
        HELLO + b": x\r\n\r\n",
        HELLO + b"\0: x\r\n\r\n",
        HELLO + b"\0\r\n\r\n",
        b"GET /health HTTP/1.1\r\n\r\n",
        b"GET /health HTTP/1.0\r\n" + chunked + b"\r\n0\r\n\r\n",
        b"GET  /health HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /health  HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /health\tHTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /health HTTP/1.1 \r\nHost: x\r\n\r\n",
        b"G(T /health HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET health HTTP/1.1\r\nHost: x\r\n\r\n",
        POST + chunked + b"\r\n-1\r\n{}\r\n0\r\n\r\n",
        POST + chunked + b"\r\nfffffffffffffffff\r\n{}\r\n0\r\n\r\n",
        POST + chunked + b"\r\nzz\r\n{}\r\n0\r\n\r\n",
        POST + chunked + b"\r\n2\n{}\r\n0\r\n\r\n",
        POST + chunked + b"\r\n2\r\n{}X\r\n0\r\n\r\n",
    ]
    with serving.serving(binary) as server:
        for attempt in attempts:
            answer, closed = raw_until_end(server, attempt + SMUGGLED, silence=5)
            assert closed and statuses(answer) in ([400], [413]), (attempt, answer)
            error = json.loads(answer.split(b"\r\n\r\n", 1)[1])["error"]
            assert error["code"] in ("malformed-request", "body-too-large"), (attempt, error)
        body = b'{"model": "base", "prompt": "a", "max_tokens": 1}'
        chunk = b"%x;x=y\r\n%s\r\n0\r\nX: trailer\r\n\r\n" % (len(body), body)
        whole = POST + chunked + b"Connection: close\r\n\r\n" + chunk
        assert statuses(raw(server, whole, 60, 60)) == [200]


def check_framing(binary):
    """What is well formed is served however it is cut: requests one after the other in the same
    bytes, byte by byte, of HTTP/1.0, with a body that waits for a 100."""
    body = b'{"model": "base", "prompt": "a", "max_tokens": 1}'
    length = b"Content-Length: %d\r\n" % len(body)
    with serving.serving(binary) as server:
        together = HELLO + b"\r\n" + POST + length + b"\r\n" + body + SMUGGLED + \
            HELLO + b"Connection: close\r\n\r\n"
        for pieces in ([together], [b"\r\n" + together],
                       [together[i:i + 1] for i in range(len(together))],
                       [together[i:i + 7] for i in range(0, len(together), 7)]):
            with server.connect() as sock:
                for piece in pieces:
                    sock.sendall(piece)
                answer = b"".join(iter(lambda s=sock: s.recv(65536), b""))
            assert statuses(answer) == [200] * 4, answer
            assert answer.count(b'"text_completion"') == 1 and answer.count(b'"list"') == 1
            assert answer.count(b"Connection: close") == 1
        # HTTP/1.0 closes, unless it is asked not to; a stream has no chunks there.
        answer, closed = raw_until_end(server, b"GET /health HTTP/1.0\r\n\r\n", silence=5)
        assert closed and statuses(answer) == [200] and b"Connection: close" in answer
        answer, closed = raw_until_end(server, b"GET /health HTTP/1.0\r\n"
                                               b"Connection: keep-alive\r\n\r\n")
        assert not closed and statuses(answer) == [200]
        stream = body[:-1] + b', "stream": true}'
        answer, closed = raw_until_end(server, POST.replace(b"1.1", b"1.0") + b"Content-Length: "
                                       b"%d\r\n\r\n" % len(stream) + stream, silence=20)
        assert closed and b"chunked" not in answer and answer.endswith(b"data: [DONE]\n\n")
        # HEAD is known to no route, and its answer has no body.
        answer, closed = raw_until_end(server, HELLO.replace(b"GET", b"HEAD") + b"\r\n")
        assert not closed and statuses(answer) == [405] and answer.endswith(b"\r\n\r\n")
        assert statuses(raw(server, HELLO.replace(b"/health", b"http://x:80/health?a=b") +
                            b"\r\n")) == [200]
        with server.connect() as sock:
            sock.sendall(POST + length + b"Expect: 100-continue\r\n\r\n")
            assert sock.recv(1000) == b"HTTP/1.1 100 Continue\r\n\r\n"
            sock.sendall(body)
            assert statuses(sock.recv(65536)) == [200]


def check_answers_of_the_http_layer(binary):
    """What is refused before any route sees it is answered in JSON once, closes the connection,
    stands in the log with its code, and is counted."""
    huge = b"x" * 9000
    cases = [
        (400, "malformed-request", HELLO + b"a b: c\r\n\r\n"),
        (413, "body-too-large", POST + b"Content-Length: 99999\r\n\r\n"),
        (413, "body-too-large", POST + b"Transfer-Encoding: chunked\r\n\r\n1770\r\n" +
         b" " * 6000),
        (414, "uri-too-long", b"GET /" + huge),
        (431, "headers-too-large", HELLO + b"X: " + huge),
        (431, "headers-too-large", HELLO + b"X: y\r\n" * 101 + b"\r\n"),
        (417, "expectation-failed", HELLO + b"Expect: miracles\r\n\r\n"),
        (505, "http-version", b"GET /health HTTP/2.0\r\nHost: x\r\n\r\n"),
        (408, "receive-timeout", HELLO),
        (408, "receive-timeout", POST + b"Content-Length: 100\r\n\r\n{"),
    ]
    with serving.serving(binary, "--body-bytes-max", 4096, "--header-bytes-max", 8192,
                         "--receive-timeout", 1) as server:
        for status, code, data in cases:
            answer, closed = raw_until_end(server, data, silence=5)
            assert closed and statuses(answer) == [status], (data[:100], answer)
            head, body = answer.split(b"\r\n\r\n", 1)
            assert b"Content-Type: application/json" in head and b"Connection: close" in head
            assert json.loads(body)["error"]["code"] == code, (data[:100], body)
        def logged():
            return [(line["status"], line.get("code")) for line in server.access_log()]
        until(lambda: len(logged()) >= len(cases))
        assert logged() == [(status, code) for status, code, _ in cases], logged()
        text = get(server, "/metrics").bytes.decode().splitlines()
        for status in (400, 414, 417, 505):
            assert 'sidepath_http_responses_total{code="%d"} 1' % status in text
        for status in (408, 413, 431):
            assert 'sidepath_http_responses_total{code="%d"} 2' % status in text


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


def check_ids(binary):
    """One line of the log finds a complaint: by the answer's id, by the id that came with the
    request, and it names the field that was refused."""
    with serving.serving(binary) as server:
        body = {"model": "base", "prompt": "a", "max_tokens": 1}
        own = post(server, "/v1/completions", body)
        sent = post(server, "/v1/completions", body, headers={"X-Request-Id": "abc/1 \u00e9"})
        long = post(server, "/v1/completions", body, headers={"X-Request-Id": "x" * 65})
        bad = post(server, "/v1/completions", {**body, "top_k": "many"})
        assert own.json["id"] == "cmpl-" + own.headers["x-request-id"]
        assert long.json["id"] == "cmpl-" + long.headers["x-request-id"]
        assert sent.headers["x-request-id"] == "abc/1 \u00e9"
        assert bad.status == 400 and bad.headers["x-request-id"]
        assert raw(server, HELLO + b"a b\r\n\r\n").count(b"X-Request-Id: ") == 1
        until(lambda: len(server.access_log()) == 5)
        lines = server.access_log()
        assert [line["id"] for line in lines[:3]] == [a.json["id"][5:] for a in (own, sent, long)]
        assert ["request_id" in line for line in lines] == [False, True, False, False, False]
        assert lines[3]["param"] == "top_k" and lines[3]["id"] == bad.headers["x-request-id"]


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
        # Said as soon as there is too much of it; what is on its way still is read over.
        chunk = b"1000\r\n" + b" " * 4096 + b"\r\n"
        chunked = POST + b"Transfer-Encoding: chunked\r\n\r\n"
        for n in (2, 40, 1000):
            assert statuses(raw(server, chunked + chunk * n + b"0\r\n\r\n")) == [413]
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
        with server.connect() as sock: # one that says nothing is closed without an answer
            assert sock.recv(100) == b""
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
                code = "too-many-tokens" if path == "/tokenize" else "context_length_exceeded"
                assert error["code"] == code, (path, error)
                param = "messages" if "messages" in body else "prompt"
                assert error["param"] == param and "max-context" in error["message"], error
                taken = 8 * listed if path == "/tokenize" else listed
                assert "more than %d tokens" % taken in error["message"], (path, error)
        # More than the context can be counted, and only there.
        long = "a b" * listed
        count = post(server, "/tokenize", {"prompt": long}).json["count"]
        assert count > listed
        assert post(server, "/v1/completions", {"prompt": long}).code == "context_length_exceeded"
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
        until(lambda: sum(not line["whole"] for line in server.access_log()
                          if line["path"] == "/v1/completions") == 9, 5, "nine lines of the log")


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
        long = {**LONG, "n": 128}
        answer = post(server, "/v1/completions", long)
        assert (answer.status, answer.code) == (504, "request-timeout"), answer.bytes
        # In a stream that has begun the error is the last event.
        answer = post(server, "/v1/completions", {**long, "stream": True})
        last = json.loads(answer.bytes.decode().rstrip("\n").split("\n\n")[-1][6:])
        assert answer.status == 200 and last["error"]["code"] == "request-timeout", last
        until(lambda: references(server) == 0)


def connect_from(server, address):
    return socket.create_connection(server.address, timeout=60, source_address=(address, 0))


def is_open(sock):
    sock.setblocking(False)
    try:
        return sock.recv(1, socket.MSG_PEEK) != b""
    except BlockingIOError:
        return True
    except ConnectionError:
        return False
    finally:
        sock.settimeout(60)


def ended(server, reason):
    name = 'sidepath_connections_ended_total{reason="%s"} ' % reason
    text = get(server, "/metrics").bytes.decode()
    return int(re.search("^" + re.escape(name) + "(.*)$", text, re.M).group(1))


def check_connections_of_one_address(binary):
    """At the limit of one address its own oldest idle connection makes way, and nobody else's;
    where all of them are busy, what is new may ask for little."""
    with serving.serving(binary, "--adapter-dir", ADAPTERS,
                         "--connections-per-address", 3) as server:
        other = connect_from(server, "127.0.0.2")
        socks = [server.connect() for _ in range(3)]
        for sock in [other, *socks]:
            sock.sendall(HELLO + b"\r\n")
            assert sock.recv(1000).startswith(b"HTTP/1.1 200")
        assert get(server, "/health").status == 200
        until(lambda: not is_open(socks[0]))
        assert is_open(other) and is_open(socks[1]) and is_open(socks[2])
        until(lambda: any("connections-per-address" in line for line in server.log))
        streams = [server.connect() for _ in range(3)]
        for sock in streams:
            sock.sendall(bytes_of({**LONG, "stream": True}))
            assert sock.recv(10)
        assert get(server, "/health").status == 200
        refused = get(server, "/v1/models")
        assert (refused.status, refused.code) == (503, "too-many-connections"), refused.bytes
        other.sendall(b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n")
        assert other.recv(1000).startswith(b"HTTP/1.1 200")
        for sock in [other, *socks, *streams]:
            sock.close()
        until(lambda: get(server, "/v1/models").status == 200)


def check_idle_connections(binary):
    """Many more idle connections than there may be: /health and completions go on, another address
    keeps what it has, and what was cut off was idle."""
    with serving.serving(binary, "--adapter-dir", ADAPTERS, "--connections", 100) as server:
        quiet = connect_from(server, "127.0.0.3")
        stream = server.connect()
        stream.sendall(bytes_of({**LONG, "stream": True, "max_tokens": 200}))
        socks = []
        for i in range(400):
            socks.append(server.connect())
            if i % 40 == 0:
                start = time.monotonic()
                assert get(server, "/health").status == 200
                assert time.monotonic() - start < 2
        assert complete(server, "base", max_tokens=2)
        assert is_open(quiet) and is_open(socks[-1]) and not is_open(socks[0])
        assert ended(server, "shed") >= 300
        until(lambda: sum("limit of connections" in line for line in server.log) == 1)
        got = b""
        while b"[DONE]" not in got:
            part = stream.recv(65536)
            assert part, "the stream was cut off"
            got += part
        for sock in [quiet, stream, *socks]:
            sock.close()


def check_unfinished_connections(binary):
    """The same with connections that have begun a request and do not end it: they wait for a while,
    meanwhile /health answers; then the oldest of an address that has most make way."""
    with serving.serving(binary, "--connections", 40) as server:
        beginnings = [HELLO, POST + b"Content-Length: 100\r\n\r\n{"]
        socks = []
        def begin(n):
            for i in range(n):
                socks.append(server.connect())
                socks[-1].sendall(beginnings[i % 2])
        begin(39)
        until(lambda: b'sidepath_connections{state="idle"} 0\n' in get(server, "/metrics").bytes)
        begin(41)
        start = time.monotonic()
        assert get(server, "/health").status == 200
        refused = get(server, "/v1/models")
        assert refused.status == 200 or refused.code == "too-many-connections", refused.bytes
        assert time.monotonic() - start < 2
        def serves():
            return get(server, "/v1/models").status == 200
        until(serves, 10, "a place among unfinished requests")
        for sock in socks:
            sock.close()


def check_few_descriptors(binary):
    """With `ulimit -n 64` there are fewer connections, which is said; health goes on. A GPU's
    driver has some 40 files of its own."""
    few = 64 if serving.EXACT else 112
    with serving.serving(binary, "--adapter-dir", ADAPTERS, descriptors=few) as server:
        assert any("ulimit -n" in line for line in server.log), server.log
        socks = [server.connect() for _ in range(100)]
        start = time.monotonic()
        assert get(server, "/health").status == 200
        assert complete(server, "sqldoc", max_tokens=2)
        assert time.monotonic() - start < 5
        for sock in socks:
            sock.close()
    tiny = serving.start_failing(binary, descriptors=32)
    assert "ulimit -n" in tiny and "[" not in tiny, tiny


def client_bytes(server, kind):
    text = get(server, "/metrics").bytes.decode()
    return int(re.search('^sidepath_client_bytes{kind="%s"} (.*)$' % kind, text, re.M).group(1))


def check_memory_of_bodies(binary):
    """Bodies that never end fill their share of one budget and no more; small requests are served
    meanwhile, and all of it comes back."""
    most = 16 << 20
    with serving.serving(binary, "--client-bytes-max", most) as server:
        socks = []
        for _ in range(40):
            sock = server.connect()
            sock.setblocking(False)
            data = POST + b"Content-Length: 2097152\r\n\r\n" + b" " * ((2 << 20) - 1)
            try:
                while data:
                    data = data[sock.send(data):]
                    if not data:
                        break
            except (BlockingIOError, ConnectionError):
                pass
            socks.append((sock, data))
        refused = set()
        for sock, data in socks:
            sock.settimeout(20)
            try:
                sock.sendall(data)
            except ConnectionError:
                refused.add(sock)

        def are_refused():
            waiting = [sock for sock, _ in socks if sock not in refused]
            for sock in select.select(waiting, [], [], 0.02)[0]:
                try:
                    assert b"client-memory-full" in sock.recv(65536)
                except ConnectionError:
                    pass
                refused.add(sock)
            return len(refused) >= 30

        until(are_refused)
        assert 0 < client_bytes(server, "bodies") <= most * 6 // 8
        assert complete(server, "base", max_tokens=2)
        until(lambda: any("--client-bytes-max" in line for line in server.log))
        for sock, _ in socks:
            sock.close()
        until(lambda: client_bytes(server, "bodies") == 0)
        for kind in ("requests", "answers"):
            assert client_bytes(server, kind) == 0


def check_memory_of_answers(binary):
    """Answers that are kept, in pieces or whole, count too: one that wants more than there is ends
    by name, the others go on."""
    with serving.serving(binary, "--adapter-dir", ADAPTERS,
                         "--client-bytes-max", 1 << 20) as server:
        quiet = complete(server, "csource", "int", 40)
        big = {**LONG, "n": 30, "logprobs": 20, "max_tokens": 1000}
        answer = post(server, "/v1/completions", big)
        assert (answer.status, answer.code) == (503, "client-memory-full"), answer.bytes[:200]
        until(lambda: references(server) == 0)
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect(server.address)
        sock.sendall(bytes_of({**big, "stream": True}))
        until(lambda: references(server) > 0)
        assert complete(server, "csource", "int", 40) == quiet
        until(lambda: references(server) == 0, 60, "the end of a stream without room")
        sock.close()
        assert complete(server, "csource", "int", 40) == quiet
        # A prompt that would take more than all of it.
        answer = post(server, "/v1/completions", {**LONG, "prompt": ["a " * 900] * 40, "n": 8})
        assert (answer.status, answer.code) == (503, "client-memory-full"), answer.bytes[:200]
        until(lambda: client_bytes(server, "answers") + client_bytes(server, "requests") == 0)


def check_streams_that_wait(binary):
    """A stream that waits for its turn gets headers and comments meanwhile, and then its tokens;
    what is refused later is an event."""
    with serving.serving(binary, "--max-running", 1, "--stream-keep-alive", 1) as server:
        first = server.connect()
        first.sendall(bytes_of({**LONG, "model": "base", "stream": True, "n": 12}))
        assert first.recv(10)
        connection = http.client.HTTPConnection(*server.address, timeout=60)
        body = {"model": "base", "prompt": "The", "max_tokens": 4, "temperature": 0,
                "ignore_eos": True, "stream": True, "return_token_ids": True}
        start = time.monotonic()
        connection.request("POST", "/v1/completions", json.dumps(body), serving.JSON)
        response = connection.getresponse()
        assert response.status == 200 and 0.9 < time.monotonic() - start < 5
        assert response.readline() == b": waiting\n" and time.monotonic() - start > 1.9
        first.close()
        answer = serving.Answer(response)
        events = [json.loads(line[6:]) for line in answer.bytes.decode().splitlines()
                  if line.startswith("data: {")]
        tokens = [t for e in events for c in e["choices"] for t in c["token_ids"]]
        assert tokens == complete(server, "base", max_tokens=4, ignore_eos=True)[0]
        assert answer.bytes.endswith(b"data: [DONE]\n\n")
        connection.close()


def check_shutdown(binary):
    """SIGTERM: what runs finishes, what is new is turned away; a second signal does not wait."""
    with serving.serving(binary, "--adapter-dir", ADAPTERS, "--shutdown-timeout", 600) as server:
        got = []
        body = {"model": "csource", "prompt": "int", "max_tokens": 1500, "temperature": 0,
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
        until(lambda: any("every request was finished" in line for line in server.log))
    with serving.serving(binary, "--adapter-dir", ADAPTERS, "--shutdown-timeout", 600) as server:
        with server.connect() as sock:
            sock.sendall(bytes_of({**LONG, "stream": True, "n": 16}))
            until(lambda: references(server) == 16)
            server.process.send_signal(signal.SIGTERM)
            until(lambda: any("finishing" in line for line in server.log))
            server.process.send_signal(signal.SIGTERM)
            assert server.process.wait(timeout=20) == 0
            until(lambda: any("cut off" in line for line in server.log))


def check_unfinished_at_the_end(binary):
    """A client with half a request, and one that does not take its answer, do not hold the end; the
    first is told."""
    with serving.serving(binary, "--adapter-dir", ADAPTERS, "--shutdown-timeout", 60) as server:
        half = server.connect()
        half.sendall(POST + b"Content-Length: 100\r\n\r\n{")
        late = server.connect() # its body is whole in time, and it is answered
        late.sendall(POST + b"Content-Length: 49\r\n\r\n")
        until(lambda: get(server, "/health").status == 200)
        start = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        until(lambda: any("finishing" in line for line in server.log))
        late.sendall(b'{"model": "base", "prompt": "a", "max_tokens": 1}')
        assert statuses(late.recv(65536)) == [200]
        assert server.process.wait(timeout=30) == 0
        assert time.monotonic() - start < 10
        answer = half.recv(65536)
        assert statuses(answer) == [503] and b"shutting-down" in answer, answer
        until(lambda: any("every request was finished" in line for line in server.log))


CHECKS = [check_smuggling, check_framing, check_answers_of_the_http_layer, check_ids,
          check_garbage, check_limits, check_giant_prompts, check_clients_that_leave,
          check_slow_readers, check_request_timeout, check_connections_of_one_address,
          check_idle_connections, check_unfinished_connections, check_few_descriptors,
          check_memory_of_bodies, check_memory_of_answers, check_streams_that_wait,
          check_shutdown, check_unfinished_at_the_end]


if __name__ == "__main__":
    run_checks([c for c in CHECKS if len(sys.argv) < 3 or c.__name__ in sys.argv[2:]], sys.argv[1])
