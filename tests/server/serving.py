"""Starts `sidepath serve` for the tests beside this file, and talks to it with the standard library
alone."""

import contextlib
import http.client
import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "demo"
BASE = DEMO / "base"
ADAPTERS = DEMO / "adapters"
JSON = {"Content-Type": "application/json"}
START_SECONDS = 120
# Texts that are compared with known ones are those of F32, which runs on the CPU only.
EXACT = [] if os.environ.get("SIDEPATH_DEVICE", "cpu") != "cpu" else ["--precision", "f32"]


def limit_of(descriptors):
    """What a child does before it becomes the server: `ulimit -n`, where it is given."""
    if descriptors is None:
        return None
    return lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, descriptors))


def start_failing(binary, *flags, descriptors=None, model=BASE):
    """The last line of a server that must not start."""
    command = [str(binary), "serve", "--model", str(model), "--port", "0", *map(str, flags)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=START_SECONDS,
                          check=False, preexec_fn=limit_of(descriptors))
    assert done.returncode in (1, 2), (done.returncode, done.stderr)
    return done.stderr.splitlines()[-1]


class Server:
    """One server process. `log` holds the lines of its standard error so far; an `unread` one's are
    read up to its address only."""

    def __init__(self, binary, *flags, environment=None, unread=False, descriptors=None,
                 model=BASE):
        command = [str(binary), "serve", "--model", str(model), "--port", "0", "--threads", "1",
                   *map(str, flags)]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL,
                                        env=environment or os.environ.copy(),
                                        preexec_fn=limit_of(descriptors))
        self.log = []
        self.address = None
        self._unread = unread
        self._found = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        if not self._found.wait(START_SECONDS) or not self.address:
            self.process.kill()
            raise RuntimeError("the server did not start: %s" % self.log)

    def _read(self):
        for line in self.process.stderr:
            line = line.decode("utf-8", "replace").rstrip("\n")
            self.log.append(line)
            match = re.search(r"at http://(?:([0-9.]+):(\d+)|unix:(\S+))$", line)
            if match:
                self.address = match.group(3) or (match.group(1), int(match.group(2)))
                self._found.set()
                if self._unread:
                    return
        self._found.set()

    @property
    def url(self):
        return "http://%s:%d" % self.address

    def connect(self):
        if not isinstance(self.address, str):
            return socket.create_connection(self.address, timeout=60)
        made = socket.socket(socket.AF_UNIX)
        made.settimeout(60)
        made.connect(self.address)
        return made

    def stop(self, number=signal.SIGTERM):
        """Ends it and returns its exit status."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        code = self.process.wait(timeout=120)
        self._reader.join(timeout=10)
        return code

    def access_log(self):
        return [json.loads(line) for line in list(self.log) if line.startswith("{")]


@contextlib.contextmanager
def serving(binary, *flags, **more):
    """A server that must end well: exit status 0, nothing of a sanitizer in its log."""
    server = Server(binary, *flags, **more)
    try:
        yield server
    except BaseException:
        server.process.kill()
        sys.stderr.write("\n".join(server.log[-20:]) + "\n")
        raise
    code = server.stop()
    assert code == 0, (code, server.log[-40:])
    for line in server.log:
        assert "Sanitizer" not in line and "runtime error" not in line, server.log[-60:]


class Answer:
    def __init__(self, response):
        self.status = response.status
        self.headers = dict((k.lower(), v) for k, v in response.getheaders())
        self.bytes = response.read()

    @property
    def json(self):
        return json.loads(self.bytes)

    @property
    def code(self):
        return self.json["error"]["code"]

    def events(self):
        """The objects of a stream, which must end as it should."""
        assert self.headers["content-type"].startswith("text/event-stream"), self.headers
        parts = self.bytes.decode().split("\n\n")
        assert parts[-1] == "" and parts[-2] == "data: [DONE]", parts[-2:]
        parts = [part for part in parts if not part.startswith(": ")]
        assert all(part.startswith("data: ") for part in parts[:-1])
        return [json.loads(part[6:]) for part in parts[:-2]]


def call(server, method, path, body=None, headers=None, timeout=120):
    connection = http.client.HTTPConnection(*server.address, timeout=timeout)
    data = None
    merged = {}
    if body is not None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        merged.update(JSON)
    merged.update(headers or {})
    try:
        connection.request(method, path, body=data, headers=merged)
        return Answer(connection.getresponse())
    finally:
        connection.close()


def get(server, path, **more):
    return call(server, "GET", path, **more)


def post(server, path, body, **more):
    return call(server, "POST", path, body, **more)


def complete(server, model, prompt="The", max_tokens=8, **fields):
    """Tokens and text of a greedy completion that has to succeed."""
    body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0,
            "return_token_ids": True, **fields}
    if model is not None:
        body["model"] = model
    answer = post(server, "/v1/completions", body)
    assert answer.status == 200, (answer.status, answer.bytes)
    choice = answer.json["choices"][0]
    return choice["token_ids"], choice["text"]


def generate(binary, adapter, prompt, max_tokens, *flags):
    """What `sidepath generate` says: the oracle of what is served."""
    command = [str(binary), "generate", "--model", str(BASE), "--json", "--threads", "1",
               "--max-tokens", str(max_tokens), *flags]
    for name in ("scripture", "csource", "sqldoc"):
        command += ["--adapter", "%s=%s" % (name, ADAPTERS / name)]
    command += ["--request", "%s=%s" % (adapter, prompt)]
    out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return json.loads(out.splitlines()[0])


@contextlib.contextmanager
def folder_of_adapters(**links):
    """A fresh directory with copies of the demo's adapters: name="scripture"."""
    with tempfile.TemporaryDirectory() as top:
        for name, source in links.items():
            target = Path(top) / name
            target.mkdir()
            for file in (ADAPTERS / source).iterdir():
                (target / file.name).write_bytes(file.read_bytes())
        yield Path(top)


@contextlib.contextmanager
def model_without(*names, **files):
    """The demo's base in a fresh folder called "base", without some of its files and with others:
    config_json={...} writes config.json."""
    with tempfile.TemporaryDirectory() as top:
        folder = Path(top) / "base"
        folder.mkdir()
        for file in BASE.iterdir():
            if file.name not in names:
                (folder / file.name).write_bytes(file.read_bytes())
        for name, content in files.items():
            text = content if isinstance(content, str) else json.dumps(content)
            stem, ending = name.rsplit("_", 1)
            (folder / (stem + "." + ending)).write_text(text)
        yield folder


def until(condition, seconds=20, what="a condition"):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return
        time.sleep(0.02)
    raise AssertionError("%s did not come within %s s" % (what, seconds))


def run_checks(checks, binary):
    """Calls every function with the binary and prints its name and time."""
    assert checks, "no check has this name"
    for check in checks:
        start = time.monotonic()
        check(binary)
        print("%-44s %6.2f s" % (check.__name__, time.monotonic() - start), flush=True)
