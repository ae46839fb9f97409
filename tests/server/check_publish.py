#!/usr/bin/env python3
"""Adapters that requests bring along: the ways in, what is refused, and that an answer is of the
version that it names."""

import json
import sys
import threading
from pathlib import Path

import publishing
import serving
from serving import call, complete, get, post, run_checks

NAMES = ("scripture", "csource", "sqldoc")
FLAGS = ("--max-loras", 4, "--max-lora-rank", 32)


def listed(server, name):
    """What the server says of a loaded adapter."""
    found = [one for one in get(server, "/v1/lora_adapters").json["data"]
             if one["name"] == name and one["state"] != "draining"]
    assert len(found) == 1, found
    return found[0]


def put(server, name, body, headers, query=""):
    return call(server, "PUT", "/v1/adapters/%s%s" % (name, query), body, headers=headers)


def published(answer):
    assert answer.status == 200, (answer.status, answer.bytes)
    assert answer.headers["x-adapter-digest"] == answer.json["digest"]
    assert answer.headers["x-adapter-generation"] == str(answer.json["generation"])
    return answer.json


def check_publish_ways(binary):
    """Two parts, one file, shared memory, and vLLM's route give what the folder gives."""
    with serving.serving(binary, *FLAGS, "--adapter-dir", serving.ADAPTERS) as server:
        for name in NAMES:
            want_ids = complete(server, name)[0]
            want = listed(server, name)
            config, weights = publishing.files_of(name)
            whole = publishing.one_file(config, weights)
            answers = [published(publishing.publish(server, "fresh", config, weights)),
                       published(put(server, "fresh", whole, publishing.FILE))]
            with publishing.shared(whole) as memory:
                answers.append(published(put(server, "fresh", {"shm": {"name": memory}}, None)))
                answers.append(published(put(
                    server, "fresh", {"shm": {"name": "/" + memory, "bytes": len(whole)}}, None)))
            with publishing.shared(b"x" * 11 + weights) as memory:
                answers.append(published(put(
                    server, "fresh", {"shm": {"name": memory, "offset": 11},
                                      "config": json.loads(config)}, None)))
                done = post(server, "/v1/load_lora_adapter",
                            {"lora_name": "fresh", "load_inplace": True,
                             "shm": {"name": memory, "offset": 11},
                             "config": json.loads(config)})
                assert done.status == 200 and b"Success" in done.bytes, done.bytes
                assert done.headers["x-adapter-digest"] == want["digest"]
            done = post(server, "/v1/load_lora_adapter?lora_name=fresh&load_inplace=true", whole,
                        headers=publishing.FILE)
            assert done.status == 200 and b"Success" in done.bytes, done.bytes
            generations = [one["generation"] for one in answers]
            assert generations == sorted(set(generations)), generations
            for one in answers:
                assert one["digest"] == want["digest"] and one["receipt"] == want["receipt"], one
            assert complete(server, "fresh")[0] == want_ids
            assert listed(server, "fresh")["digest"] == want["digest"]


def check_publish_refusals(binary):
    """By name, and the version before stays."""
    config, weights = publishing.files_of("csource")
    whole = publishing.one_file(config, weights)
    with serving.serving(binary, *FLAGS, "--adapter-bytes-max", len(weights) + 4096) as server:
        first = published(publishing.publish(server, "a", config, weights))
        want = complete(server, "a")
        cut = config.replace(b'"lora_alpha"', b'"lora_alpa"')
        parts = publishing.multipart
        shared = {"name": "sidepath-no-such-memory"}
        cases = [
            (400, "unknown-field", parts(config=config, weights=weights, more=b""), "multipart"),
            (400, "weights-missing", parts(config=config), "multipart"),
            (400, "config-missing", parts(weights=weights), "multipart"),
            (400, "config-missing", weights, "file"),
            (400, "truncated", whole[:-1], "file"),
            (400, "truncated", b"", "file"),
            (400, "header-malformed", b"\x02" + b"\0" * 7 + b"[]", "file"),
            (400, "multipart-malformed", parts(config=config, weights=weights)[:-4], "multipart"),
            (400, "multipart-malformed", parts(config=config, weights=weights) + b"x", "multipart"),
            (400, "unknown-field", parts(config=cut, weights=weights), "multipart"),
            (413, "body-too-large", whole + b"\0" * 8192, "file"),
            (415, "not-an-adapter", whole, "text"),
            (400, "unsupported-field", {"nccl": {"rank": 0}}, "json"),
            (400, "unsupported-field", {"cuda_ipc": ["handle"]}, "json"),
            (400, "shm-missing", {"shm": shared}, "json"),
            (400, "invalid-value", {"shm": {"name": "../etc/passwd"}}, "json"),
            (400, "invalid-value", {"shm": {"name": ".hidden"}}, "json"),
            (400, "unknown-field", {"shm": dict(shared, size=1)}, "json"),
            (400, "invalid-value", {}, "json"),
        ]
        headers = {"multipart": publishing.MULTIPART, "file": publishing.FILE, "json": None,
                   "text": {"Content-Type": "text/plain"}}
        for status, code, body, kind in cases:
            answer = put(server, "a", body, headers[kind])
            assert (answer.status, answer.code) == (status, code), (code, answer.bytes)
        with publishing.shared(whole) as memory:
            for more, code in (({"bytes": len(whole) + 1}, "shm-bounds"),
                               ({"offset": len(whole)}, "shm-bounds"),
                               ({"offset": 1}, "header-malformed")):
                answer = put(server, "a", {"shm": {"name": memory, **more}}, None)
                assert answer.status == 400, answer.bytes
                assert answer.code == code or code == "header-malformed", answer.bytes
        with publishing.shared(whole + b"\0" * 8192) as memory:
            answer = put(server, "a", {"shm": {"name": memory}}, None)
            assert (answer.status, answer.code) == (413, "body-too-large"), answer.bytes
        for name, status in (("a%2Fb:c", 400), ("a/b", 404), ("%ff", 400), ("base", 400)):
            answer = put(server, name, whole, publishing.FILE)
            assert answer.status == status, (name, answer.bytes)
        for query, status, code in (("?expected_generation=999", 409, "generation-changed"),
                                    ("?expected_generation=x", 400, "invalid-value"),
                                    ("?pinned", 400, "invalid-query"),
                                    ("?pinned=true&pinned=true", 400, "invalid-query"),
                                    ("?replace=true", 400, "unknown-field")):
            answer = put(server, "a", whole, publishing.FILE, query)
            assert (answer.status, answer.code) == (status, code), answer.bytes
        now = listed(server, "a")
        assert (now["digest"], now["generation"]) == (first["digest"], first["generation"])
        assert complete(server, "a") == want
        again = put(server, "a", whole, publishing.FILE,
                    "?expected_generation=%d&pinned=true" % first["generation"])
        assert published(again)["generation"] > first["generation"]
        assert listed(server, "a")["pinned"]


def check_publish_keys(binary):
    """It takes the key that loads take, before the body is read; and a limit of all clients."""
    config, weights = publishing.files_of("csource")
    key = Path("/dev/shm") / ("sidepath-test-key-%d" % serving.os.getpid())
    key.write_text("a-key\n")
    try:
        with serving.serving(binary, *FLAGS, "--admin-key-file", key) as server:
            assert publishing.publish(server, "a", config, weights).code == "invalid_api_key"
            bearer = {"Authorization": "Bearer a-key"}
            published(publishing.publish(server, "a", config, weights, headers=bearer))
        with serving.serving(binary, *FLAGS, "--no-adapter-routes") as server:
            answer = publishing.publish(server, "a", config, weights)
            assert (answer.status, answer.code) == (403, "adapter-routes-off"), answer.bytes
        with serving.serving(binary, *FLAGS, "--client-bytes-max", 65536) as server:
            answer = publishing.publish(server, "a", config, weights)
            assert (answer.status, answer.code) == (413, "body-too-large"), answer.bytes
            assert b"--client-bytes-max" in answer.bytes
    finally:
        key.unlink()


def check_publish_versions(binary):
    """One bit changes the digest; a request that runs keeps its version to its end."""
    config, weights = publishing.files_of("scripture")
    with serving.serving(binary, *FLAGS) as server:
        seen, digests = {}, set()
        for i in range(6):
            changed = publishing.with_bit(weights, 64 * i, 3)
            version = published(publishing.publish(server, "a", config, changed))
            digests.add(version["digest"])
            answer = post(server, "/v1/completions", {"model": "a", "prompt": "In the beginning",
                                                      "max_tokens": 12, "temperature": 0})
            assert answer.json["adapter_digest"] == version["digest"]
            seen[version["digest"]] = answer.json["choices"][0]["text"]
        assert len(digests) == 6
        other = publishing.files_of("csource")
        before = published(publishing.publish(server, "a", config, weights))
        want = complete(server, "a", "In the beginning", 200, ignore_eos=True)
        got = []

        def run():
            got.append(post(server, "/v1/completions",
                            {"model": "a", "prompt": "In the beginning", "max_tokens": 200,
                             "temperature": 0, "ignore_eos": True, "return_token_ids": True}))

        thread = threading.Thread(target=run)
        thread.start()
        serving.until(lambda: listed(server, "a")["references"] == 1, what="the request")
        after = published(publishing.publish(server, "a", *other))
        assert after["digest"] != before["digest"]
        thread.join()
        assert got[0].json["adapter_digest"] == before["digest"]
        assert got[0].json["choices"][0]["token_ids"] == want[0]
        now = post(server, "/v1/completions", {"model": "a", "prompt": "int", "max_tokens": 1})
        assert now.json["adapter_digest"] == after["digest"]


CHECKS = [check_publish_ways, check_publish_refusals, check_publish_keys, check_publish_versions]


if __name__ == "__main__":
    run_checks([c for c in CHECKS if len(sys.argv) < 3 or c.__name__ in sys.argv[2:]], sys.argv[1])
