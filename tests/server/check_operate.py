#!/usr/bin/env python3
"""What an operator sees of a start, and what outlives a restart.
    check_operate.py SIDEPATH [CHECK..]"""

import contextlib
import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import serving
from serving import complete, get, post, run_checks, until


def lines_with(server, text):
    return [line for line in server.log if text in line]


@contextlib.contextmanager
def folders():
    """A directory with three adapters, a folder and a name that are none, and what is no folder."""
    with tempfile.TemporaryDirectory() as top:
        directory = Path(top) / "adapters"
        shutil.copytree(serving.ADAPTERS, directory)
        for name in ("notes", "a:b", ".half"):
            (directory / name).mkdir()
        (directory / "README").write_text("x")
        yield directory


def check_start_report(binary):
    """A start says what runs, with the numbers that /metrics has, what was found and skipped, and
    warns of a port that everybody reaches without keys."""
    with folders() as directory, serving.serving(
            binary, "--adapter-dir", directory, "--max-loras", 3, "--kv-tokens", 4096,
            "--max-running", 5, "--queue", 7, "--adapter",
            "x=%s" % (serving.ADAPTERS / "sqldoc")) as server:
        until(lambda: lines_with(server, "3 adapters in --adapter-dir"))
        text = "\n".join(server.log)
        version = get(server, "/version").json["version"]
        status = get(server, "/status.json").json
        assert "version %s; base is qwen3 in bf16" % version in text, text
        assert "%s on 1 threads; 3 slots of rank 8 " % status["cpu_isa"] in text, text
        assert status["kv"]["pages"] * status["kv"]["page_tokens"] == 4096
        assert "KV cache of 4096 tokens" in text and "5 requests run, 7 wait" in text, text
        assert "chat by " in text and "no keys are asked for; adapters can be " in text, text
        assert lines_with(server, '"notes" in --adapter-dir is skipped: '), text
        assert not lines_with(server, "warning"), text
        assert re.search(r"base, 1 adapters, at http://[0-9.:]+$", text, re.M), text


def check_exposed(binary):
    """0.0.0.0 without keys is warned of; with keys, or with keys for adapters, that says less."""
    with tempfile.TemporaryDirectory() as top:
        keys = Path(top) / "keys"
        keys.write_text("k\n")
        for flags, want in (((), " can send requests and change adapters"),
                            (("--no-adapter-routes",), " can send requests"),
                            (("--admin-key-file", keys), " can send requests"),
                            (("--api-key-file", keys), None)):
            with serving.serving(binary, "--host", "0.0.0.0", *flags) as server:
                warned = lines_with(server, "warning: 0.0.0.0 ")
                assert bool(warned) == (want is not None), server.log
                assert want is None or warned[0].endswith(want), warned


def check_json_log(binary):
    """With --log-format json every line is an object with its time, the start one of facts."""
    command = [str(binary), "serve", "--model", str(serving.BASE), "--port", "0", "--threads", "1",
               "--log-format", "json", "--adapter-dir", str(serving.ADAPTERS), "--adapter",
               "bad=/nowhere"]
    with subprocess.Popen(command, stderr=subprocess.PIPE) as process:
        lines = []
        awaited = 2 # the folders are looked through beside the start: either line may be first
        for raw in process.stderr:
            lines.append(json.loads(raw))
            assert re.match(r"\d{4}-\d\d-\d\dT", lines[-1]["time"]), raw
            awaited -= lines[-1].get("event") == "start"
            awaited -= lines[-1].get("message") == "3 adapters in --adapter-dir"
            if awaited == 0:
                awaited = -1
                process.send_signal(signal.SIGTERM)
        assert process.wait() == 0
    start = [line for line in lines if line.get("event") == "start"][0]
    assert start["family"] == "qwen3" and start["threads"] == 1 and start["slots"] == 8, start
    assert start["adapters"] == 0 and start["adapters_refused"] == 1 and not start["exposed"]
    assert start["address"].startswith("127.0.0.1:") and not start["keys"], start
    messages = [line["message"] for line in lines if "message" in line]
    assert any(m.startswith('adapter "bad" is left out: ') for m in messages), messages
    assert "3 adapters in --adapter-dir" in messages, messages
    assert messages[-1] == "every request was finished", messages


def check_probes_unlogged(binary):
    """/health, /ready and /metrics leave no line while they are well, and one else."""
    with tempfile.TemporaryDirectory() as top:
        base = Path(top) / "base"
        shutil.copytree(serving.BASE, base)
        with serving.serving(binary, model=base) as server:
            for path in ("/health", "/ready", "/metrics", "/version"):
                assert get(server, path).status == 200
            until(lambda: server.access_log())
            assert [line["path"] for line in server.access_log()] == ["/version"]
            os.utime(base / "model.safetensors")
            until(lambda: get(server, "/ready").status == 503)
            until(lambda: server.access_log()[-1]["path"] == "/ready")
            assert server.access_log()[-1]["status"] == 503
            assert get(server, "/health").status == 200


def check_progress(binary):
    """At a terminal a bar comes to its end; elsewhere what takes no time leaves no line."""
    command = [str(binary), "serve", "--model", str(serving.BASE), "--port", "0", "--threads", "1"]
    parent, child = pty.openpty()
    with subprocess.Popen(command, stderr=child) as process:
        os.close(child)
        text = b""
        while b"at http://" not in text:
            text += os.read(parent, 4096)
        process.send_signal(signal.SIGTERM)
        assert process.wait() == 0
    os.close(parent)
    assert re.search(rb"\rweights +\[#{24}\] 100 %  5\.8 of 5\.8 MiB\x1b\[K\r?\n", text), text
    with serving.serving(binary) as server:
        assert not lines_with(server, "%"), server.log


# ---- the state's file ---------------------------------------------------------------------------


def load(server, name, path, **more):
    answer = post(server, "/v1/load_lora_adapter", {"lora_name": name, "lora_path": path, **more})
    assert answer.status == 200, answer.bytes


def listed(server):
    """Name → (state, pinned, active) of what is loaded."""
    adapters = get(server, "/status.json").json["adapters"]
    return {a["name"]: (a["pinned"], a["active"]) for a in adapters}


def saved(state, wanted):
    """Waits for the file to say so."""
    def says():
        try:
            text = state.read_text() # never a part of one
            return text != "" and wanted(json.loads(text))
        except FileNotFoundError:
            return False
    until(says)


ASK = {"prompt": "SELECT", "max_tokens": 8, "temperature": 0}


def answers(server):
    """What the default, an adapter and the base say."""
    return [post(server, "/v1/completions", {**ASK, **more}).json["choices"][0]["text"]
            for more in ({}, {"model": "second"}, {"model": "base"})]


def change_and_kill(binary, flags, state):
    """Loads, unloads and activates, and returns the answers; the server gets no time to save more
    than it did."""
    server = serving.Server(binary, *flags)
    try:
        load(server, "house", "sqldoc", pinned=True)
        load(server, "second", "csource")
        assert post(server, "/v1/unload_lora_adapter", {"lora_name": "scripture"}).status == 200
        assert post(server, "/v1/lora/active", {"lora_name": "house"}).status == 200
        saved(state, lambda s: s["active"] == "house" and s["unloaded"] == ["scripture"])
        return answers(server)
    finally:
        server.process.kill()
        server.process.wait()


def check_state_file(binary):
    """Names, pins, the active one and unloaded names outlive a kill, and so do the answers."""
    with folders() as directory:
        state = directory.parent / "state.json"
        flags = ("--adapter-dir", directory, "--state-file", state)
        want = change_and_kill(binary, flags, state)
        assert len(set(want)) == 3, want
        with serving.serving(binary, *flags) as server:
            assert listed(server) == {"house": (True, True), "second": (False, False)}
            assert answers(server) == want
            assert post(server, "/v1/completions", {**ASK, "model": "scripture"}).status == 404
            assert post(server, "/v1/unload_lora_adapter", {"lora_name": "second"}).status == 200
            saved(state, lambda s: [a["name"] for a in s["adapters"]] == ["house"])
        # The folder is gone: its name is refused, the rest starts, the base is the default.
        shutil.rmtree(directory / "sqldoc")
        with serving.serving(binary, *flags) as server:
            assert lines_with(server, 'adapter "house" is left out'), server.log
            assert lines_with(server, 'warning: "house" was active and is not there'), server.log
            refused = get(server, "/status.json").json["refused"]
            assert [r["name"] for r in refused] == ["house"], refused
            assert post(server, "/v1/completions", ASK).json["choices"][0]["text"] == want[2]
        assert "house" in state.read_text() # it may be there again at the next start


BROKEN = [b"{", b"[]", b"{}", b'{"name": "my package", "version": 3}', b"\x00" * 64, b"\xff\xfe",
          b'{"state_of_sidepath": 2, "adapters": []}', b'{"state_of_sidepath": 1}',
          b'{"state_of_sidepath": 1, "adapters": [{"name": 1}]}',
          b'{"state_of_sidepath": 1, "adapters": [], "active": 5}',
          b'{"state_of_sidepath": 1, "adapters": [], "unloaded": [1]}']


def check_foreign_state_file(binary):
    """A file that is no state ends the start with its name and is left as it is; so do a folder and
    a missing one. Names and paths in it are held to the rules that clients are held to."""
    with folders() as directory:
        state = directory.parent / "state.json"
        for content in BROKEN:
            state.write_bytes(content)
            line = serving.start_failing(binary, "--state-file", state)
            assert "state.json" in line and "[state-file-invalid]" in line, line
            assert state.read_bytes() == content
        assert "state-file" in serving.start_failing(binary, "--state-file",
                                                     directory / "none" / "state.json")
        assert str(directory) in serving.start_failing(binary, "--state-file", directory)
        state.write_text(json.dumps({"state_of_sidepath": 1, "active": None, "adapters": [
            {"name": "out", "path": "../base"}, {"name": "abs", "path": str(serving.BASE)},
            {"name": "a:b", "path": "sqldoc"}, {"name": "good", "path": "sqldoc"}]}))
        with serving.serving(binary, "--adapter-dir", directory, "--state-file", state) as server:
            assert list(listed(server)) == ["good"]
            for name in ("out", "abs", "a:b"):
                assert lines_with(server, 'adapter "%s" is left out' % name), server.log
        state.write_bytes(b"")
        with serving.serving(binary, "--adapter-dir", directory, "--state-file", state) as server:
            load(server, "good", "sqldoc")
            saved(state, lambda s: s["adapters"][0]["path"] == "sqldoc")


def write_state(state, active, **paths):
    state.write_text(json.dumps({"state_of_sidepath": 1, "active": active, "unloaded": [],
                                 "adapters": [{"name": name, "path": path, "pinned": name == "lost"}
                                              for name, path in paths.items()]}))


def names(state):
    return {a["name"]: (a["path"], a["pinned"]) for a in state["adapters"]}


def check_state_file_missing(binary):
    """What could not be restored stays saved over changes of others, and means the folder that was
    saved; a client's load or unload of the name ends that."""
    with folders() as directory:
        state = directory.parent / "state.json"
        flags = ("--adapter-dir", directory, "--state-file", state, "--max-lora-rank", 16)
        (directory / "sqldoc").rename(directory / "away")
        (directory / "csource").rename(directory / "lost")  # as its name, and another version
        write_state(state, "lost", lost="sqldoc", gone="none/at/all", out="../base",
                    here="scripture")
        with serving.serving(binary, *flags) as server:
            assert list(listed(server)) == ["here"]
            load(server, "other", "scripture")
            want = {"lost": ("sqldoc", True), "gone": ("none/at/all", False),
                    "out": ("../base", False), "here": ("scripture", False),
                    "other": ("scripture", False)}
            saved(state, lambda s: names(s) == want and s["active"] == "lost")
            assert post(server, "/v1/completions", {**ASK, "model": "lost"}).status == 404
            (directory / "away").rename(directory / "sqldoc")
            load(server, "direct", "sqldoc")
            assert complete(server, "lost", max_tokens=8) == complete(server, "direct",
                                                                      max_tokens=8)
            assert listed(server)["lost"] == (True, False), listed(server)
            unload = "/v1/unload_lora_adapter"
            assert post(server, unload, {"lora_name": "gone"}).status == 200
            assert post(server, unload, {"lora_name": "gone"}).status == 404
            load(server, "out", "scripture")
            want = {**want, "out": ("scripture", False), "direct": ("sqldoc", False)}
            del want["gone"]
            saved(state, lambda s: names(s) == want and s["active"] == "lost")
            post(server, "/v1/lora/active", {"lora_name": None})
            saved(state, lambda s: s["active"] is None)


def check_state_file_hanging(binary):
    """A start ends by SIGTERM while the file system keeps it waiting, and the file is as it was."""
    shim = Path(binary).parent / "tests" / "slow_files.so"
    if not shim.exists() or b"__asan_init" in Path(binary).read_bytes():
        print("skipped: no %s, or a sanitizer" % shim)
        sys.exit(77)
    with folders() as directory:
        state = directory.parent / "state.json"
        write_state(state, "a", a="scripture", b="sqldoc")
        before = state.read_bytes()
        command = [binary, "serve", "--model", str(serving.BASE), "--port", "0", "--adapter-dir",
                   str(directory), "--state-file", str(state)]
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=dict(
            os.environ, LD_PRELOAD=str(shim), SLOW_FILES_MS="100000"))
        time.sleep(1.5)
        assert process.poll() is None
        began = time.monotonic()
        process.send_signal(signal.SIGTERM)
        said = process.communicate(timeout=30)[1]
        assert process.returncode == 0 and time.monotonic() - began < 8, said
        assert "was told to end while it read the adapters" in said, said
        assert "being read; they are left" in said, said
        assert state.read_bytes() == before


def check_state_file_late(binary):
    """A file system that does not answer holds a start up for a minute and some seconds, not for
    ever; what it kept is saved on, and the server ends when it is told to."""
    shim = Path(binary).parent / "tests" / "slow_files.so"
    if not shim.exists() or b"__asan_init" in Path(binary).read_bytes():
        print("skipped: no %s, or a sanitizer" % shim)
        sys.exit(77)
    with folders() as directory:
        state = directory.parent / "state.json"
        write_state(state, "a", a="scripture", b="sqldoc")
        environment = dict(os.environ, LD_PRELOAD=str(shim), SLOW_FILES_MS="300000")
        began = time.monotonic()
        with serving.serving(binary, "--adapter-dir", directory, "--state-file", state,
                             environment=environment) as server:
            assert 60 < time.monotonic() - began < 110
            for name in ("a", "b"):
                assert any('adapter "%s" is left out' % name in line and "[load-timeout]" in line
                           for line in server.log), server.log
            assert complete(server, "base", max_tokens=2)
            post(server, "/v1/lora/active", {"lora_name": None})
            saved(state, lambda s: list(names(s)) == ["a", "b"] and s["active"] is None)


def check_state_file_unwritable(binary):
    """A state that cannot be written is a warning, and nothing else."""
    with folders() as directory:
        place = directory.parent / "place"
        place.mkdir()
        with serving.serving(binary, "--adapter-dir", directory, "--state-file",
                             place / "state.json") as server:
            place.rmdir()
            load(server, "good", "sqldoc")
            until(lambda: lines_with(server, "warning: the state was not saved"))
            assert complete(server, "good", max_tokens=2)


def check_first_request(binary):
    """The weights are in memory when the port opens: with prefault off they are not yet."""
    def resident(server):
        kib, here = 0, False
        for line in Path("/proc/%d/smaps" % server.process.pid).read_text().splitlines():
            if "-" in line.split(" ")[0]:
                here = "model.safetensors" in line
            elif here and line.startswith("Rss:"):
                kib += int(line.split()[1])
        return kib << 10
    with serving.serving(binary) as server:
        before = resident(server)
        start = time.monotonic()
        complete(server, "base", max_tokens=1)
        first = time.monotonic() - start
        assert before > 6e6 and resident(server) - before < 65536, (before, resident(server))
    with serving.serving(binary, "--no-weights-prefault") as server:
        without = resident(server)
        start = time.monotonic()
        complete(server, "base", max_tokens=1)
        print("first request: %.1f ms, without prefault %.1f ms" %
              (1e3 * first, 1e3 * (time.monotonic() - start)))
        assert without < 3e6, without


CHECKS = [check_start_report, check_exposed, check_json_log, check_probes_unlogged, check_progress,
          check_state_file, check_foreign_state_file, check_state_file_missing,
          check_state_file_hanging, check_state_file_late, check_state_file_unwritable,
          check_first_request]


if __name__ == "__main__":
    run_checks([c for c in CHECKS if len(sys.argv) < 3 or c.__name__ in sys.argv[2:]], sys.argv[1])
