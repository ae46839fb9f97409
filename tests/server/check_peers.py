#!/usr/bin/env python3
"""A server whose adapters come from peers, and the peers: what comes is what the folder gives, by
name and by digest; peers that are dead, stopped or changed cost their own requests an error by
name and nobody else anything. Skipped where the build has no transport."""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import serving
from serving import get, post, run_checks, until

KEY = "a key that both sides have, long enough\n"
SKIPPED = 77
EXPERTS = ("experts-fused-attn", "router", "v4-sparse-experts")
NAMES = {"scripture", "csource", "sqldoc"}  # the demo's adapters; a peer offers them one by one


class Peer:
    """One `sidepath peer`. `address` is where it listens; `prefix` comes before its command."""

    def __init__(self, binary, folder, *flags, port=0, prefix=()):
        command = [*prefix, str(binary), "peer", "--dir", str(folder), "--port", str(port),
                   "--rescan-ms", "50", *map(str, flags)]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        self.address = None
        self.log = []
        found = threading.Event()

        def read():
            for line in self.process.stderr:
                self.log.append(line.rstrip("\n"))
                if "listening on " in line:
                    self.address = line.split("listening on ")[1].split()[0].rstrip(",")
                    found.set()
            found.set()

        threading.Thread(target=read, daemon=True).start()
        if not found.wait(60) or not self.address:
            self.process.kill()
            raise RuntimeError("the peer did not start: %s" % self.log)

    @property
    def port(self):
        return int(self.address.rsplit(":", 1)[1])

    def stop(self, number=signal.SIGKILL):
        if self.process.poll() is None:
            self.process.send_signal(number)
            self.process.wait(30)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
        self.stop()


def complete(server, model, max_tokens=4):
    body = {"prompt": "In the beginning", "max_tokens": max_tokens, "temperature": 0}
    return post(server, "/v1/completions", {**body, "model": model} if model else body)


def metrics(server, name, address):
    for line in get(server, "/metrics").bytes.decode().splitlines():
        if line.startswith('%s{peer="%s"}' % (name, address)):
            return float(line.split()[-1])
    raise AssertionError("no %s of %s" % (name, address))


def names(server):
    return [one["id"] for one in get(server, "/v1/models").json["data"]]


def text_of(server, model):
    answer = complete(server, model, max_tokens=12)
    assert answer.status == 200, answer.bytes
    return answer.json["choices"][0]["text"], answer.json["adapter_digest"]


def texts_from_disk(binary):
    with serving.serving(binary, "--adapter-dir", serving.ADAPTERS, "--max-lora-rank", 32) as one:
        return {name: text_of(one, name) for name in NAMES}


def documents_agree(text):
    """docs/OPERATIONS.md explains every family of peers and no other."""
    explained = re.findall(r"`(sidepath_peer_[a-z_]+)`",
                           (serving.ROOT / "docs/OPERATIONS.md").read_text())
    assert set(re.findall(r"^# TYPE (sidepath_peer_\S+)", text, re.M)) == set(explained)


def check_peer_by_name(binary):
    """The text and the digest that the same folder gives from disk; a name that no peer has is a
    404; unloaded, it is unknown until it is loaded by name; DEFAULT stays what it was."""
    wanted = texts_from_disk(binary)
    with Peer(binary, serving.ADAPTERS) as peer:
        with serving.serving(binary, "--peer", peer.address, "--max-lora-rank", 32) as server:
            until(lambda: NAMES <= set(names(server)), what="the peer's names")
            assert names(server).count("scripture") == 1
            assert get(server, "/v1/models/scripture").status == 200
            assert get(server, "/v1/models/nobody").status == 404
            base = complete(server, None).json
            for name, text in wanted.items():
                assert text_of(server, name) == text, name
            assert complete(server, None).json["adapter_digest"] is None
            assert base["adapter_digest"] is None
            assert complete(server, "nobody").status == 404
            assert metrics(server, "sidepath_peer_up", peer.address) == 1
            assert metrics(server, "sidepath_peer_bytes_total", peer.address) > 1000
            documents_agree(get(server, "/metrics").bytes.decode())
            assert post(server, "/v1/unload_lora_adapter", {"lora_name": "csource"}).status == 200
            assert complete(server, "csource").status == 404
            assert "csource" not in names(server)
            loaded = post(server, "/v1/load_lora_adapter", {"lora_name": "csource"})
            assert loaded.status == 200, loaded.bytes
            assert text_of(server, "csource") == wanted["csource"]
            unknown = post(server, "/v1/load_lora_adapter", {"lora_name": "nobody"})
            assert unknown.status == 404, unknown.bytes
            active = post(server, "/v1/lora/active", {"lora_name": "sqldoc"})
            assert active.status == 200, active.bytes


def check_peer_by_digest(binary):
    """Under another name, and once for several loads at a time."""
    wanted = texts_from_disk(binary)
    digest = wanted["scripture"][1]
    with Peer(binary, serving.ADAPTERS) as peer:
        with serving.serving(binary, "--peer", peer.address, "--max-lora-rank", 32) as server:
            answers = []

            def load(name):
                answers.append(post(server, "/v1/load_lora_adapter",
                                    {"lora_name": name, "adapter_digest": digest}))

            until(lambda: NAMES <= set(names(server)), what="the peer's names")
            threads = [threading.Thread(target=load, args=("mine%d" % i,)) for i in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert [one.status for one in answers] == [200] * 4, [one.bytes for one in answers]
            assert text_of(server, "mine2") == wanted["scripture"]
            assert metrics(server, "sidepath_peer_manifests_total", peer.address) == 1
            other = digest[:-1] + ("0" if digest[-1] != "0" else "1")
            unknown = post(server, "/v1/load_lora_adapter",
                           {"lora_name": "x", "adapter_digest": other})
            assert (unknown.status, unknown.code) == (404, "peer-not-found"), unknown.bytes
            bad = post(server, "/v1/load_lora_adapter",
                       {"lora_name": "x", "adapter_digest": "zz"})
            assert (bad.status, bad.json["error"]["param"]) == (400, "adapter_digest"), bad.bytes


def check_peer_that_stops(binary):
    """Stopped: 504 after the deadline, and folders load as fast as ever meanwhile. Killed: 502.
    Started again: it serves again. What was loaded serves on throughout."""
    wanted = texts_from_disk(binary)
    with tempfile.TemporaryDirectory() as local:
        shutil.copytree(serving.ADAPTERS / "sqldoc", Path(local) / "local")
        with Peer(binary, serving.ADAPTERS) as peer:
            flags = ("--peer", peer.address, "--peer-timeout", 1, "--max-lora-rank", 32,
                     "--adapter-dir", local)
            with serving.serving(binary, *flags) as server:
                until(lambda: NAMES <= set(names(server)), what="the peer's names")
                assert text_of(server, "scripture") == wanted["scripture"]
                peer.process.send_signal(signal.SIGSTOP)
                late = []
                asking = threading.Thread(target=lambda: late.append(complete(server, "csource")))
                began = time.monotonic()
                asking.start()
                assert text_of(server, "local")[0] == wanted["sqldoc"][0]
                local_seconds = time.monotonic() - began
                assert text_of(server, "scripture") == wanted["scripture"]
                asking.join()
                assert (late[0].status, late[0].code) == (504, "peer-timeout"), late[0].bytes
                assert 0.9 < time.monotonic() - began < 30
                print("a load from disk beside a stopped peer: %.0f ms" % (1000 * local_seconds))
                peer.stop()
                gone = complete(server, "csource")
                assert gone.status in (502, 504), gone.bytes
                until(lambda: complete(server, "csource").code == "peer-unreachable",
                      what="the peer to be known as gone")
                assert text_of(server, "scripture") == wanted["scripture"]
                until(lambda: metrics(server, "sidepath_peer_up", peer.address) == 0,
                      what="its metric")
                with Peer(binary, serving.ADAPTERS, port=peer.port):
                    until(lambda: complete(server, "csource").status == 200, seconds=30,
                          what="the peer that is back")
                    assert text_of(server, "csource") == wanted["csource"]


def check_peer_with_other_bytes(binary):
    """Other files under a name change nothing of what is loaded, until it is loaded again."""
    wanted = texts_from_disk(binary)
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(serving.ADAPTERS / "scripture", Path(folder) / "house")
        with Peer(binary, folder) as peer:
            with serving.serving(binary, "--peer", peer.address, "--max-lora-rank", 32) as server:
                until(lambda: "house" in names(server), what="the peer's names")
                assert text_of(server, "house") == wanted["scripture"]
                shutil.copytree(serving.ADAPTERS / "csource", Path(folder) / ".new")
                os.rename(Path(folder) / "house", Path(folder) / ".old")
                os.rename(Path(folder) / ".new", Path(folder) / "house")
                assert text_of(server, "house") == wanted["scripture"]

                def reload():
                    return post(server, "/v1/load_lora_adapter",
                                {"lora_name": "house", "load_inplace": True})

                until(lambda: reload().status == 200 and text_of(server, "house") ==
                      wanted["csource"], what="the new files")


def check_peer_keys(binary):
    """The same key on both sides, or nothing."""
    with tempfile.TemporaryDirectory() as folder:
        key, other = Path(folder) / "key", Path(folder) / "other"
        key.write_text(KEY)
        other.write_text("another " + KEY)
        key.chmod(0o600)
        other.chmod(0o600)
        with Peer(binary, serving.ADAPTERS, "--peer-key-file", key) as peer:
            for flags in ((), ("--peer-key-file", other)):
                with serving.serving(binary, "--peer", peer.address, *flags) as server:
                    refused = post(server, "/v1/load_lora_adapter", {"lora_name": "scripture"})
                    assert (refused.status, refused.code) == (502, "peer-key"), refused.bytes
            with serving.serving(binary, "--peer", peer.address, "--peer-key-file", key,
                                 "--peer-trust-images", peer.address, "--max-lora-rank", 32) as one:
                until(lambda: "scripture" in names(one), what="the peer's names")
                assert text_of(one, "scripture")[1]


def check_peer_images(binary):
    """What a peer has packed is taken where it is trusted and the slots are the same, and is what
    packing here gives; else the tensors come."""
    wanted = texts_from_disk(binary)
    with tempfile.TemporaryDirectory() as folder:
        key = Path(folder) / "key"
        key.write_text(KEY)
        key.chmod(0o600)
        with Peer(binary, serving.ADAPTERS, "--peer-key-file", key, "--pack", "--model",
                  serving.BASE, "--max-lora-rank", 32) as peer:
            for trust, rank, taken in ((True, 32, 1), (False, 32, 0), (True, 40, 0)):
                flags = ["--peer", peer.address, "--peer-key-file", key, "--max-lora-rank", rank]
                flags += ["--peer-trust-images", peer.address] * trust
                with serving.serving(binary, *flags) as server:
                    until(lambda: NAMES <= set(names(server)), what="the peer's names")
                    assert text_of(server, "scripture") == wanted["scripture"]
                    assert metrics(server, "sidepath_peer_images_taken_total",
                                   peer.address) == taken, (trust, rank)
                    assert metrics(server, "sidepath_peer_images_passed_over_total",
                                   peer.address) == 1 - taken, (trust, rank)


def check_peer_expert_images(binary):
    """Routers and experts in images: the tokens and the digest of the tensors, and of the disk."""
    base = serving.ROOT / "tests/fixtures/qwen3moe"
    body = {"prompt": [1, 2, 3, 4, 5], "max_tokens": 8, "temperature": 0, "logprobs": 1}
    flags = ["--max-lora-rank", 16, "--chat-template", "none", "--expert-bytes", 1 << 26]
    answers = {}

    def ask(server, name):
        answer = post(server, "/v1/completions", {**body, "model": name})
        assert answer.status == 200, answer.bytes
        return answer.json["adapter_digest"], answer.json["choices"][0]["logprobs"]

    with tempfile.TemporaryDirectory() as folder:
        key = Path(folder) / "key"
        key.write_text(KEY)
        key.chmod(0o600)
        with serving.serving(binary, "--adapter-dir", base / "adapters", *flags, model=base) as one:
            answers["disk"] = [ask(one, name) for name in EXPERTS]
        with Peer(binary, base / "adapters", "--peer-key-file", key, "--pack", "--model", base,
                  "--max-lora-rank", 16) as peer:
            for trust in (True, False):
                known = ["--peer", peer.address, "--peer-key-file", key]
                known += ["--peer-trust-images", peer.address] * trust
                with serving.serving(binary, *flags, *known, model=base) as one:
                    until(lambda: set(EXPERTS) <= set(names(one)), what="the peer's names")
                    answers[trust] = [ask(one, name) for name in EXPERTS]
                    assert metrics(one, "sidepath_peer_images_taken_total",
                                   peer.address) == len(EXPERTS) * trust
    assert answers[True] == answers[False] == answers["disk"], answers


def check_peer_digest_cache(binary):
    """The second start offers what the first has hashed, and serves it; a damaged file costs a
    note, a new one is written; with --pack it does not start."""
    wanted = texts_from_disk(binary)
    with tempfile.TemporaryDirectory() as folder:
        local, cache = Path(folder) / "adapters", Path(folder) / "digests"
        shutil.copytree(serving.ADAPTERS, local)
        time.sleep(2.1) # what has changed just now is hashed again

        def run(flags=()):
            with Peer(binary, local, "--digest-cache", cache, *flags) as peer:
                until(lambda: sum("is offered" in line for line in peer.log) == len(NAMES),
                      what="the offers")
                until(cache.exists, what="the file")
                with serving.serving(binary, "--peer", peer.address, "--max-lora-rank", 32) as one:
                    until(lambda: NAMES <= set(names(one)), what="the peer's names")
                    assert text_of(one, "csource") == wanted["csource"]
                return sum("of an earlier run" in line for line in peer.log), peer.log

        assert run()[0] == 0
        assert run()[0] == len(NAMES)
        whole = cache.read_bytes()
        cache.write_bytes(whole[:-1])
        known, log = run()
        assert known == 0 and any("digest cache is not used" in line for line in log), log
        until(lambda: cache.read_bytes() == whole, what="the file to be whole again")
        assert run()[0] == len(NAMES)
        assert run(("--allow-partial",))[0] == 0
        try:
            Peer(binary, local, "--digest-cache", cache, "--pack", "--model", serving.BASE)
            raise AssertionError("it has started")
        except RuntimeError as error:
            assert "exclude each other" in str(error), error


def check_peer_order(binary):
    """Folders first, then the peers in their order; one that is not there is passed over."""
    wanted = texts_from_disk(binary)
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(serving.ADAPTERS / "csource", Path(folder) / "scripture")
        with Peer(binary, serving.ADAPTERS) as second, Peer(binary, folder) as first:
            dead = first.address
            first.stop()
            with serving.serving(binary, "--peer", dead, "--peer", second.address,
                                 "--max-lora-rank", 32) as server:
                until(lambda: NAMES <= set(names(server)), what="the peer's names")
                assert text_of(server, "scripture") == wanted["scripture"]


def check_peer_settings(binary):
    """What contradicts itself does not start."""
    for flags, word in ((("--peer", "here"), "peer-address"),
                        (("--peer", "h:1", "--peer", "h:1"), "twice"),
                        (("--peer", "h:1", "--peer-trust-images", "h:2"), "none of the peers"),
                        (("--peer", "h:1", "--peer-trust-images", "h:1"), "peer-key-file"),
                        (("--peer", "h:1", "--loader-threads", 0), "loader-threads")):
        line = serving.start_failing(binary, *flags)
        assert word in line, (flags, line)


CHECKS = (check_peer_by_name, check_peer_by_digest, check_peer_that_stops,
          check_peer_with_other_bytes, check_peer_keys, check_peer_images,
          check_peer_expert_images, check_peer_digest_cache, check_peer_order, check_peer_settings)


def has_transport(binary):
    """A build without UCX refuses at once, and by name."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            with Peer(binary, folder):
                return True
        except RuntimeError as error:
            if "no-ucx" in str(error):
                return False
            raise


if __name__ == "__main__":
    if not has_transport(sys.argv[1]):
        print("skipped: this build has no UCX")
        sys.exit(SKIPPED)
    run_checks([c for c in CHECKS if len(sys.argv) < 3 or c.__name__ in sys.argv[2:]], sys.argv[1])
