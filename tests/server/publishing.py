"""Bodies that publish the demo's adapters, for the tests beside this file."""

import contextlib
import json
import os
import struct
from pathlib import Path

from serving import ADAPTERS, call, serving

BOUNDARY = "one-boundary-of-this-test"
MULTIPART = {"Content-Type": "multipart/form-data; boundary=" + BOUNDARY}
FILE = {"Content-Type": "application/octet-stream"}


def files_of(name):
    """(config, weights) of a demo's adapter, as bytes."""
    folder = ADAPTERS / name
    return ((folder / "adapter_config.json").read_bytes(),
            (folder / "adapter_model.safetensors").read_bytes())


def multipart(**parts):
    """A body of multipart/form-data."""
    body = b""
    for name, data in parts.items():
        body += ("--%s\r\nContent-Disposition: form-data; name=\"%s\"; filename=\"%s\"\r\n"
                 "Content-Type: application/octet-stream\r\n\r\n" % (BOUNDARY, name, name)).encode()
        body += data + b"\r\n"
    return body + ("--%s--\r\n" % BOUNDARY).encode()


def one_file(config, weights):
    """The safetensors file with the config in its metadata."""
    length = struct.unpack("<Q", weights[:8])[0]
    header = json.loads(weights[8:8 + length])
    header["__metadata__"] = dict(header.get("__metadata__", {}), adapter_config=config.decode())
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + weights[8 + length:]


def with_bit(weights, at, bit=0):
    """The same file with one bit of its data changed, counted from the data's first byte."""
    data = bytearray(weights)
    first = 8 + struct.unpack("<Q", weights[:8])[0]
    data[first + at] ^= 1 << bit
    return bytes(data)


def publish(server, name, config, weights, query="", headers=None, **more):
    """PUT as two parts."""
    return call(server, "PUT", "/v1/adapters/%s%s" % (name, query),
                multipart(config=config, weights=weights),
                headers=dict(MULTIPART, **(headers or {})), **more)


def digests_of(binary, *files):
    """The digests of (config, weights), by a server that does nothing else."""
    found = []
    with serving(binary, "--max-loras", 4, "--max-lora-rank", 32) as server:
        for config, weights in files:
            answer = publish(server, "quiet", config, weights)
            assert answer.status == 200, answer.bytes
            found.append(answer.json["digest"])
    return found


@contextlib.contextmanager
def shared(data):
    """The name of a shared-memory object that holds the bytes."""
    name = "sidepath-test-%d" % os.getpid()
    path = Path("/dev/shm") / name
    path.write_bytes(data)
    try:
        yield name
    finally:
        path.unlink()
