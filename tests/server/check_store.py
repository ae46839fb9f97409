#!/usr/bin/env python3
"""Published adapters that outlive the server: a restart, a kill in the middle of publishes, files
that were changed, and a host cache that holds less than all of them."""

import http.client
import random
import re
import shutil
import sys
import tempfile
import threading
import time
from pathlib import Path

import publishing
import serving
from serving import complete, get, post, run_checks

FLAGS = ("--max-loras", 4, "--max-lora-rank", 32)


def contents(store):
    """The folders of the store, each of which must be whole."""
    found = []
    for entry in sorted(Path(store).iterdir()):
        if entry.is_dir():
            assert entry.name.startswith("sha256-"), entry
            assert sorted(file.name for file in entry.iterdir()) == [
                "adapter_config.json", "adapter_model.safetensors"], entry
            found.append(entry.name.removeprefix("sha256-"))
        else:
            assert entry.name == "names.json", entry
    return found


def published(server, name, files, query=""):
    answer = publishing.publish(server, name, *files, query=query)
    assert answer.status == 200, answer.bytes
    return answer.json


def loaded(server):
    return {one["name"]: one for one in get(server, "/v1/lora_adapters").json["data"]
            if one["state"] not in ("available", "draining")}


def evictions(server):
    text = get(server, "/metrics").bytes.decode()
    return int(re.search(r"^sidepath_host_cache_evictions_total (\d+)$", text, re.M).group(1))


def check_store_restart(binary):
    """What was published is there again, as it was; what was unloaded, or replaced by a folder, is
    not; and nothing is left of what no name means."""
    with tempfile.TemporaryDirectory() as store:
        flags = (*FLAGS, "--adapter-store", store, "--adapter-dir", serving.ADAPTERS)
        files = {name: publishing.files_of(name) for name in ("scripture", "csource", "sqldoc")}
        with serving.serving(binary, *flags) as server:
            for name in files:
                published(server, "my%20" + name, files[name],
                          "?pinned=true" if name == "sqldoc" else "")
            first = published(server, "a", (files["csource"][0],
                                            publishing.with_bit(files["csource"][1], 9)))
            second = published(server, "a", files["csource"])
            assert first["digest"] != second["digest"]
            serving.until(lambda: len(contents(store)) == 3, what="a tidy store")
            want = {name: (one["digest"], complete(server, name))
                    for name, one in loaded(server).items()}
        with serving.serving(binary, *flags) as server:
            assert {name: (one["digest"], complete(server, name))
                    for name, one in loaded(server).items()} == want
            assert loaded(server)["my sqldoc"]["pinned"]
            for name in ("a", "my sqldoc"):
                assert post(server, "/v1/unload_lora_adapter", {"lora_name": name}).status == 200
            answer = post(server, "/v1/load_lora_adapter",
                          {"lora_name": "my csource", "lora_path": "csource",
                           "load_inplace": True})
            assert answer.status == 200, answer.bytes
        with serving.serving(binary, *flags) as server:
            assert sorted(loaded(server)) == ["my scripture"], loaded(server)
            assert post(server, "/v1/completions", {"model": "a", "prompt": "x"}).status == 404
            assert contents(store) == [want["my scripture"][0]]


def check_store_kill(binary):
    """Killed in the middle of publishes: every name means one whole version, none older than the
    last one that was answered."""
    config, weights = publishing.files_of("scripture")
    versions = [(config, publishing.with_bit(weights, 4 * i, 4)) for i in range(36)]
    digests = publishing.digests_of(binary, *versions)
    chosen = random.Random(5)
    with tempfile.TemporaryDirectory() as store:
        sent, answered = {"a": 0, "b": 1}, {}  # numbers of versions: even ones are of a

        def run(server, name):
            while sent[name] + 2 < len(versions):
                sent[name] += 2
                try:
                    done = publishing.publish(server, name, *versions[sent[name]])
                except (OSError, http.client.HTTPException):
                    return
                assert done.status == 200 and done.json["digest"] == digests[sent[name]]
                answered[name] = sent[name]

        for _ in range(3):
            server = serving.Server(binary, *FLAGS, "--adapter-store", store)
            names = loaded(server)
            assert set(answered) <= set(names), (answered, names)
            for name, one in names.items():
                number = digests.index(one["digest"])
                assert number % 2 == sent[name] % 2 and number <= sent[name]
                assert number >= answered.get(name, 0), (name, number, answered)
                made = post(server, "/v1/completions", {"model": name, "prompt": "x",
                                                        "max_tokens": 1})
                assert made.json["adapter_digest"] == one["digest"]
            assert contents(store) == sorted(one["digest"] for one in names.values())
            threads = [threading.Thread(target=run, args=(server, name)) for name in "ab"]
            for thread in threads:
                thread.start()
            time.sleep(0.2 + chosen.random() / 2)
            server.process.kill()
            for thread in threads:
                thread.join()
            server.stop()
        assert set(answered) == {"a", "b"}, answered


def check_store_changed_files(binary):
    """A content that is not what was stored is left out by name, and the others are served."""
    with tempfile.TemporaryDirectory() as store:
        flags = (*FLAGS, "--adapter-store", store)
        with serving.serving(binary, *flags) as server:
            good = published(server, "good", publishing.files_of("csource"))
            bad = published(server, "bad", publishing.files_of("scripture"))
        file = Path(store) / ("sha256-" + bad["digest"]) / "adapter_model.safetensors"
        file.write_bytes(publishing.with_bit(file.read_bytes(), 100))
        with serving.serving(binary, *flags) as server:
            listed = {one["name"]: one for one in get(server, "/v1/lora_adapters").json["data"]}
            assert listed["good"]["digest"] == good["digest"]
            assert listed["bad"]["error"]["code"] == "store-digest", listed["bad"]
            assert post(server, "/v1/completions", {"model": "bad", "prompt": "x"}).status == 404
            assert len(contents(store)) == 2
            second = serving.start_failing(binary, *flags)
            assert "another server" in second, second
            again = published(server, "bad", publishing.files_of("sqldoc"))
        with serving.serving(binary, *flags) as server:
            assert loaded(server)["bad"]["digest"] == again["digest"]
        (Path(store) / "names.json").write_text("{}")
        assert "names.json" in serving.start_failing(binary, *flags)
        assert len(contents(store)) >= 2
        shutil.rmtree(store)
        assert "cannot be opened" in serving.start_failing(binary, *flags)
        Path(store).mkdir()


def check_store_failing(binary):
    """A version that cannot be kept is refused by name at once; the one before serves."""
    config, weights = publishing.files_of("scripture")
    with tempfile.TemporaryDirectory() as top:
        store = Path(top) / "store"
        store.mkdir()
        with serving.serving(binary, *FLAGS, "--adapter-store", store) as server:
            first = published(server, "a", (config, weights))
            shutil.rmtree(store)
            answer = publishing.publish(server, "a", config, publishing.with_bit(weights, 3))
            assert (answer.status, answer.code) == (503, "store-failed"), answer.bytes
            assert loaded(server)["a"]["digest"] == first["digest"]
            complete(server, "a")


def check_store_eviction(binary):
    """With a host cache for two images, adapters that came in requests go and come again, and each
    answers as itself; without a store one that would have to go is refused at once."""
    files = publishing.files_of("scripture")
    changed = [(files[0], publishing.with_bit(files[1], 40 * i, 6)) for i in range(6)]
    small = ("--max-loras", 2, "--max-lora-rank", 32, "--host-cache-mib", 3)
    with tempfile.TemporaryDirectory() as store:
        with serving.serving(binary, *small, "--adapter-store", store) as server:
            want = {}
            for i, one in enumerate(changed):
                version = published(server, "a%d" % i, one)
                want[i] = (version["digest"], complete(server, "a%d" % i))
            before = evictions(server)
            for i in (0, 3, 1, 5, 2, 4, 0):
                assert complete(server, "a%d" % i) == want[i][1], i
                assert loaded(server)["a%d" % i]["digest"] == want[i][0]
            assert evictions(server) > before
    with serving.serving(binary, *small) as server:
        codes = []
        for i, one in enumerate(changed):
            answer = publishing.publish(server, "a%d" % i, *one)
            codes.append(answer.status if answer.status == 200 else answer.code)
        assert codes[0] == 200 and codes[-1] == "host-cache-full", codes
        for i, code in enumerate(codes):
            if code == 200:
                complete(server, "a%d" % i)


CHECKS = [check_store_restart, check_store_kill, check_store_changed_files, check_store_failing,
          check_store_eviction]


if __name__ == "__main__":
    run_checks([c for c in CHECKS if len(sys.argv) < 3 or c.__name__ in sys.argv[2:]], sys.argv[1])
