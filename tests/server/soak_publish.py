#!/usr/bin/env python3
"""Streams while one of four adapters is replaced over and over: each answer equals what its digest
gives on a quiet server, and memory stays as it is.
    soak_publish.py SIDEPATH [PUBLISHES] [STREAMS]"""

import os
import random
import sys
import threading
import time

import publishing
import serving
from serving import complete, post

NAMES = ("p0", "p1", "p2", "p3")
PROMPTS = ("In the beginning", "int main(", "SELECT a FROM", "x", "The", "9")
VERSIONS = 12
TOKENS = 16
FLAGS = ("--max-loras", 12, "--max-lora-rank", 32, "--kv-tokens", 4096, "--no-access-log")


def make_versions():
    """(config, weights) of the demo's three adapters, each with bits changed that matter."""
    made = []
    for i in range(VERSIONS):
        config, weights = publishing.files_of(("scripture", "csource", "sqldoc")[i % 3])
        for at in range(40 * i):
            weights = publishing.with_bit(weights, 2 * (at * 37 % 4000) + 1, 6)
        made.append((config, weights))
    return made


def expected(binary, versions):
    """What each version says to each prompt: {digest: {prompt: ids}}, and the digests in order."""
    texts, digests = {}, []
    with serving.serving(binary, *FLAGS) as server:
        for config, weights in versions:
            answer = publishing.publish(server, "quiet", config, weights)
            assert answer.status == 200, answer.bytes
            digests.append(answer.json["digest"])
            texts[digests[-1]] = {prompt: complete(server, "quiet", prompt, TOKENS,
                                                   ignore_eos=True)[0] for prompt in PROMPTS}
    assert len(set(digests)) == len(versions)
    return texts, digests


def rss_mib(server):
    for line in open("/proc/%d/status" % server.process.pid, encoding="ascii"):
        if line.startswith("VmRSS"):
            return int(line.split()[1]) / 1024
    raise AssertionError("no VmRSS")


class Streams:
    """Threads that ask, as long as they are wanted, and hold each answer against its digest."""

    def __init__(self, server, texts, n):
        self.server, self.texts = server, texts
        self.wrong, self.counts, self.ended = [], {}, False
        self.threads = [threading.Thread(target=self._run, args=(i,)) for i in range(n)]
        for thread in self.threads:
            thread.start()

    def _run(self, i):
        chosen = random.Random(i)
        while not self.ended and not self.wrong:
            name, prompt = chosen.choice(NAMES), chosen.choice(PROMPTS)
            answer = post(self.server, "/v1/completions", {
                "model": name, "prompt": prompt, "max_tokens": TOKENS, "temperature": 0,
                "ignore_eos": True, "return_token_ids": True,
                "stream": bool(i % 2)})
            if answer.status != 200:
                self.wrong.append((name, answer.status, answer.bytes))
                return
            events = answer.events() if i % 2 else [answer.json]
            digests = {event["adapter_digest"] for event in events}
            ids = [one for event in events for choice in event["choices"]
                   for one in choice["token_ids"]]
            digest = digests.pop()
            if digests or ids != self.texts[digest][prompt]:
                self.wrong.append((name, digest, prompt, ids))
            self.counts[digest] = self.counts.get(digest, 0) + 1

    def end(self):
        self.ended = True
        for thread in self.threads:
            thread.join()
        assert not self.wrong, self.wrong[:3]
        return self.counts


def replace(server, versions, digests, n, chosen):
    """n publishes, one of four names each: how often there was no slot at first, and seconds."""
    busy, spent = 0, []
    for _ in range(n):
        name, number = chosen.choice(NAMES), chosen.randrange(len(versions))
        while True:
            began = time.monotonic()
            answer = publishing.publish(server, name, *versions[number])
            if answer.status != 503:
                break
            assert answer.code == "pool-full", answer.bytes
            busy += 1
            time.sleep(0.01)
        assert answer.status == 200 and answer.json["digest"] == digests[number], answer.bytes
        spent.append(time.monotonic() - began)
    return busy, spent


def soak(binary, n_publishes, n_streams):
    versions = make_versions()
    texts, digests = expected(binary, versions)
    chosen = random.Random(1)
    with serving.serving(binary, *FLAGS) as server:
        for i, name in enumerate(NAMES):
            assert publishing.publish(server, name, *versions[i]).status == 200
        streams = Streams(server, texts, n_streams)
        first = replace(server, versions, digests, n_publishes // 4, chosen)
        before = rss_mib(server)
        rest = replace(server, versions, digests, n_publishes - n_publishes // 4, chosen)
        after = rss_mib(server)
        counts = streams.end()
    spent = sorted(first[1] + rest[1])
    print("%d publishes beside %d streams: %d answers of %d versions, all as on a quiet server; "
          "%d times no slot at first; a publish %.1f ms (median), %.1f ms (longest); %.1f MiB "
          "resident after a quarter, %.1f at the end"
          % (n_publishes, n_streams, sum(counts.values()), len(counts), first[0] + rest[0],
             1e3 * spent[len(spent) // 2], 1e3 * spent[-1], before, after))
    # A short run is over before every page of the caches was used once; a sanitizer keeps what was
    # freed, to find later uses of it.
    if "ASAN_OPTIONS" not in os.environ and "TSAN_OPTIONS" not in os.environ:
        assert after < before + (16 if n_publishes >= 1000 else 64), (before, after)


if __name__ == "__main__":
    soak(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 1000,
         int(sys.argv[3]) if len(sys.argv) > 3 else 64)
