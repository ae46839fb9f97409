#!/usr/bin/env python3
"""One adapter's requests held, resumed and aborted, and nobody else's; its versions in use."""

import http.client
import json
import sys
import threading
import time

import publishing
import serving
from serving import complete, get, post, run_checks

FLAGS = ("--max-loras", 4, "--max-lora-rank", 32, "--adapter-dir", serving.ADAPTERS)


class Stream:
    """A streamed completion that is read by a thread of its own."""

    def __init__(self, server, model, prompt="The", max_tokens=60):
        self.server, self.events, self.done = server, [], False
        self.body = {"model": model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0,
                     "ignore_eos": True, "stream": True, "return_token_ids": True}
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self):
        connection = http.client.HTTPConnection(*self.server.address, timeout=120)
        connection.request("POST", "/v1/completions", body=json.dumps(self.body),
                           headers=serving.JSON)
        for line in connection.getresponse():
            if line.startswith(b"data: {"):
                self.events.append(json.loads(line[6:]))
        connection.close()
        self.done = True

    @property
    def tokens(self):
        return [token for event in list(self.events) if event.get("choices")
                for token in event["choices"][0].get("token_ids", [])]

    def finish(self):
        self.thread.join()
        return self.events[-1]["choices"][0]["finish_reason"]


def do(server, name, what, body=None):
    return post(server, "/v1/adapters/%s/%s" % (name, what), {} if body is None else body)


def cpu_seconds(server):
    fields = open("/proc/%d/stat" % server.process.pid, encoding="ascii").read().split()
    return (int(fields[13]) + int(fields[14])) / 100


def check_hold_and_resume(binary):
    """Held ones stand still with what they have, those that come wait, others go on; afterwards
    every answer is the one that it would have been."""
    with serving.serving(binary, *FLAGS) as server:
        want = {name: complete(server, name, "The", 200, ignore_eos=True)[0]
                for name in ("scripture", "csource")}
        first = Stream(server, "scripture", max_tokens=200)
        serving.until(lambda: first.tokens, what="a token")
        held = do(server, "scripture", "hold")
        assert held.json == {"name": "scripture", "held": True, "requests": 1}, held.bytes
        late = Stream(server, "scripture", max_tokens=20)
        other = Stream(server, "csource", max_tokens=200)
        assert other.finish() == "length" and other.tokens == want["csource"]
        seen = len(first.tokens)
        before = cpu_seconds(server)
        time.sleep(0.6)
        assert cpu_seconds(server) - before < 0.3, "a server whose requests are held is busy"
        assert len(first.tokens) == seen < 200 and not late.events
        listed = get(server, "/v1/adapters/scripture/versions").json["data"]
        assert [(one["held"], one["requests"]) for one in listed] == [(True, 2)], listed
        resumed = do(server, "scripture", "resume")
        assert resumed.json == {"name": "scripture", "held": False, "requests": 2}, resumed.bytes
        assert first.finish() == "length" and first.tokens == want["scripture"]
        assert late.finish() == "length" and late.tokens == want["scripture"][:20]


def check_abort(binary):
    """Running, held and waiting ones end with finish_reason abort and what they have; a request
    that comes later is served."""
    with serving.serving(binary, *FLAGS, "--max-running", 3) as server:
        other = Stream(server, "csource", max_tokens=500)
        streams = [Stream(server, "scripture", max_tokens=2000) for _ in range(4)]
        serving.until(lambda: sum(bool(one.tokens) for one in streams) > 1, what="two that run")
        whole = []
        asks = threading.Thread(target=lambda: whole.append(post(
            server, "/v1/chat/completions", {"model": "scripture", "max_tokens": 2000, "messages": [
                {"role": "user", "content": "x"}]})))
        asks.start()
        serving.until(lambda: sum(one["requests"] for one in get(
            server, "/v1/adapters/scripture/versions").json["data"]) == 5, what="five requests")
        aborted = do(server, "scripture", "abort")
        assert aborted.json == {"name": "scripture", "requests": 5}, aborted.bytes
        assert [one.finish() for one in streams] == ["abort"] * 4
        asks.join()
        assert whole[0].json["choices"][0]["finish_reason"] == "abort", whole[0].bytes
        want = complete(server, "scripture", "The", 40, ignore_eos=True)[0]
        assert all(one.tokens[:40] == want[:len(one.tokens)] for one in streams)
        assert other.finish() == "length" and len(other.tokens) == 500
        held = Stream(server, "scripture", max_tokens=1500)
        serving.until(lambda: held.tokens, what="a token")
        assert do(server, "scripture", "hold").status == 200
        assert do(server, "scripture", "abort").json["requests"] == 1
        assert held.finish() == "abort"
        assert do(server, "scripture", "resume").json["requests"] == 0
        assert complete(server, "scripture", "The", 40, ignore_eos=True)[0] == want
        assert get(server, "/v1/adapters/scripture/versions").json["data"][0]["requests"] == 0
        for what in ("hold", "abort", "resume"):
            assert do(server, "nobody", what).status == 404
        assert get(server, "/v1/adapters/nobody/versions").status == 404
        asked = serving.call(server, "POST", "/v1/adapters/scripture/abort", b"",
                             headers={"Content-Type": "text/plain"})
        assert asked.code == "not-json", asked.bytes


def check_hold_makes_way(binary):
    """Held ones that fill the cache and the batch give others room, and lose no token by it."""
    with serving.serving(binary, *FLAGS, "--max-running", 2, "--kv-tokens", 512,
                         "--max-context", 512, "--no-prefix-cache") as server:
        want = complete(server, "scripture", "The", 200, ignore_eos=True)[0]
        streams = [Stream(server, "scripture", max_tokens=200) for _ in range(2)]
        serving.until(lambda: all(len(one.tokens) > 20 for one in streams), what="tokens")
        assert do(server, "scripture", "hold").json["requests"] == 2
        assert len(complete(server, "csource", "int", 400, ignore_eos=True)[0]) == 400
        assert do(server, "scripture", "resume").json["requests"] == 2
        for one in streams:
            assert one.finish() == "length" and one.tokens == want


def check_versions_in_use(binary):
    """A version is listed as long as a request holds it."""
    config, weights = publishing.files_of("scripture")
    with serving.serving(binary, "--max-loras", 4, "--max-lora-rank", 32) as server:
        first = publishing.publish(server, "a", config, weights).json
        old = Stream(server, "a", max_tokens=400)
        serving.until(lambda: old.tokens, what="a token")
        assert do(server, "a", "hold").status == 200
        second = publishing.publish(server, "a", config, publishing.with_bit(weights, 5)).json
        listed = get(server, "/v1/adapters/a/versions").json["data"]
        assert [(one["digest"], one["generation"], one["current"], one["requests"])
                for one in listed] == [(first["digest"], first["generation"], False, 1),
                                       (second["digest"], second["generation"], True, 0)], listed
        late = Stream(server, "a", max_tokens=4)
        serving.until(lambda: get(server, "/v1/adapters/a/versions").json["data"][1]["requests"],
                      what="the request")
        assert not late.events, "a hold is for every version"
        assert do(server, "a", "resume").json["requests"] == 2
        assert old.finish() == "length" and late.finish() == "length"
        assert old.events[0]["adapter_digest"] == first["digest"]
        assert late.events[0]["adapter_digest"] == second["digest"]
        serving.until(lambda: len(get(server, "/v1/adapters/a/versions").json["data"]) == 1,
                      what="one version")


CHECKS = [check_hold_and_resume, check_abort, check_hold_makes_way, check_versions_in_use]


if __name__ == "__main__":
    run_checks([c for c in CHECKS if len(sys.argv) < 3 or c.__name__ in sys.argv[2:]], sys.argv[1])
