#!/usr/bin/env python3
"""64 streams at a time over six adapters and the base through two slots, with loads, replacements
and unloads in the loop, clients that leave in mid-stream and clients that close half of their
connection. Every stream that ends must have the tokens of a quiet server, every error must be one
that its client caused or may retry, and afterwards nothing is held and memory is flat.
    soak_server.py SIDEPATH [REQUESTS] [SEED]"""

import collections
import http.client
import json
import random
import socket
import sys
import threading
import time
from pathlib import Path

import serving
from serving import complete, folder_of_adapters, get, post, until

STREAMS = 64
MODELS = {"a1": "scripture", "a2": "csource", "a3": "sqldoc", "b1": "scripture", "b2": "csource",
          "b3": "sqldoc"}
SCALED = {"b1", "b2", "b3"}  # the same weights with another alpha: other contents
PROMPTS = ["In the", "static int", "The", "select", "And he said", "if (", "When", "a"]
RETRY = (429, 503)


def make_folder(folder):
    for name in SCALED:
        file = Path(folder) / name / "adapter_config.json"
        config = json.loads(file.read_text())
        config["lora_alpha"] = config["lora_alpha"] * 2
        file.write_text(json.dumps(config))


class Soak:
    def __init__(self, server, requests, seed):
        self.server, self.left, self.seed = server, requests, seed
        self.lock = threading.Lock()
        self.counts = collections.Counter()
        self.problems = []
        self.quiet = {}
        self.stop = threading.Event()

    def ask_quiet(self):
        for model in [*MODELS, "base"]:
            for prompt in PROMPTS:
                for seed in (None, 5):
                    more = {} if seed is None else {"temperature": 0.8, "seed": seed}
                    self.quiet[model, prompt, seed] = complete(self.server, model, prompt, 48,
                                                               **more)[0]

    def count(self, what):
        with self.lock:
            self.counts[what] += 1

    def next(self):
        with self.lock:
            self.left -= 1
            return self.left if self.left >= 0 else None

    def one_stream(self, rng):
        model, prompt = rng.choice([*MODELS, "base"]), rng.choice(PROMPTS)
        seed = rng.choice([None, 5])
        body = {"model": model, "prompt": prompt, "max_tokens": rng.randrange(1, 49),
                "temperature": 0, "stream": rng.random() < 0.8, "return_token_ids": True}
        if seed is not None:
            body.update(temperature=0.8, seed=seed)
        manner = rng.choices(["whole", "leave", "half"], [8, 1, 1])[0]
        connection = http.client.HTTPConnection(*self.server.address, timeout=120)
        try:
            connection.request("POST", "/v1/completions", json.dumps(body), serving.JSON)
            if manner == "half":
                connection.sock.shutdown(socket.SHUT_WR)
            if manner == "leave":
                time.sleep(rng.random() * 0.05)
                return self.count("left")
            answer = serving.Answer(connection.getresponse())
        except (ConnectionError, http.client.HTTPException):
            if manner == "half":
                return self.count("half-open, cut")
            raise
        finally:
            connection.close()
        if answer.status in RETRY:
            return self.count("retry")
        if answer.status != 200:
            raise AssertionError("%d %s" % (answer.status, answer.bytes[:300]))
        if body["stream"]:
            tokens = [t for e in answer.events() for c in e["choices"] for t in c["token_ids"]]
        else:
            tokens = answer.json["choices"][0]["token_ids"]
        want = self.quiet[model, prompt, seed][:body["max_tokens"]]
        if tokens != want:
            raise AssertionError("%s differs: %s, not %s" % (body, tokens, want))
        return self.count("whole")

    def worker(self, index):
        rng = random.Random(self.seed * 1000 + index)
        while self.next() is not None and not self.problems:
            try:
                self.one_stream(rng)
            except Exception as problem:  # pylint: disable=broad-except
                self.problems.append(repr(problem))

    def loader(self):
        """Loads, replaces and unloads names of its own, and two of those that streams use."""
        rng = random.Random(self.seed)
        while not self.stop.is_set() and not self.problems:
            name = rng.choice(["x1", "x2", "a1", "b2"])
            folder = name if name in MODELS else rng.choice(list(MODELS))
            body = {"lora_name": name, "lora_path": folder, "load_inplace": True}
            answer = post(self.server, "/v1/load_lora_adapter", body)
            self.count("load %d" % answer.status)
            if answer.status not in (200, *RETRY):
                self.problems.append("load: %s" % answer.bytes)
            if name not in MODELS:
                answer = post(self.server, "/v1/unload_lora_adapter", {"lora_name": name})
                self.count("unload %d" % answer.status)
                if answer.status not in (200, 404):
                    self.problems.append("unload: %s" % answer.bytes)
            time.sleep(0.01)

    def run(self):
        threads = [threading.Thread(target=self.worker, args=(i,)) for i in range(STREAMS)]
        loader = threading.Thread(target=self.loader)
        for thread in [loader, *threads]:
            thread.start()
        for thread in threads:
            thread.join()
        self.stop.set()
        loader.join()
        assert not self.problems, self.problems[:3]


def resident_kib(server):
    for line in open("/proc/%d/status" % server.process.pid, encoding="ascii"):
        if line.startswith("VmRSS"):
            return int(line.split()[1])
    return 0


def main():
    binary = sys.argv[1]
    requests = int(sys.argv[2]) if len(sys.argv) > 2 else 3000
    seed = int(sys.argv[3]) if len(sys.argv) > 3 else 1
    with folder_of_adapters(**MODELS) as folder:
        make_folder(folder)
        with serving.serving(binary, "--adapter-dir", folder, "--max-loras", 2, "--max-running",
                             STREAMS, "--no-access-log",
                             "--max-lora-rank", 16) as server:
            soak = Soak(server, requests // 4, seed)
            soak.ask_quiet()
            distinct = {tuple(soak.quiet[m, "The", None]) for m in [*MODELS, "base"]}
            assert len(distinct) >= 6, "the adapters do not differ"
            soak.run()
            before = resident_kib(server)
            soak.left = requests - requests // 4
            soak.run()
            after = resident_kib(server)
            until(lambda: all(a.get("references", 0) == 0 for a in
                              get(server, "/v1/lora_adapters").json["data"]))
            for (model, prompt, asked), tokens in list(soak.quiet.items())[::7]:
                more = {} if asked is None else {"temperature": 0.8, "seed": asked}
                assert complete(server, model, prompt, 48, **more)[0] == tokens
            print("seed %d, %d requests: %s; resident %d KiB after a quarter, %d KiB at the end" %
                  (seed, requests, dict(sorted(soak.counts.items())), before, after))
            assert soak.counts["whole"] > requests // 2
            assert after < before * 1.2 + 20000, (before, after)


if __name__ == "__main__":
    main()
