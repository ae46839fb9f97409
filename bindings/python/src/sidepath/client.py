"""Adapters published to a server: `sidepath serve` on this machine or another one.

    client = sidepath.Client("http://127.0.0.1:8000", key="secret")
    published = client.publish("policy", peft_model)
    client.publish("policy", peft_model, expected_generation=published.generation)

docs/HTTP.md, "Publishing", has the route. The standard library alone."""

from __future__ import annotations

import base64
import http.client
import json
import struct
import urllib.parse
from typing import Any, Mapping, Optional, Sequence, Union

from . import arrays, errors
from ._library import ffi
from .adapter import _json_bytes
from .engine import Loaded, Scores, on_host, published_parts

_TYPES = {"f32": "F32", "bf16": "BF16", "f16": "F16"}
CONFIG_KEY = "adapter_config"


def _dense_bytes(lent: arrays.View) -> bytes:
    """The elements of a tensor on the host, row-major."""
    size = arrays.BYTES[lent.dtype]
    count = 1
    for dimension in lent.shape:
        count *= dimension
    if not count:
        return b""
    wanted = arrays.dense(lent.shape)
    if all(have == want or dimension == 1
           for have, want, dimension in zip(lent.strides, wanted, lent.shape)):
        return bytes(ffi.buffer(lent.pointer, count * size))
    offsets = [0]
    for dimension, step in zip(lent.shape, lent.strides):
        offsets = [offset + index * step for offset in offsets for index in range(dimension)]
    whole = memoryview(ffi.buffer(lent.pointer, (max(offsets) + 1) * size)).cast("B")
    return b"".join(whole[offset * size:(offset + 1) * size] for offset in offsets)


def safetensors_bytes(tensors: Mapping[str, Any], config: Any) -> bytes:
    """A safetensors file of the tensors, with the config in its metadata as `adapter_config`."""
    header: dict[str, Any] = {"__metadata__": {CONFIG_KEY: _json_bytes(config).decode()}}
    parts, offset = [], 0
    for name, tensor in on_host(tensors).items():
        lent = arrays.view(tensor, name)
        if lent.dtype not in _TYPES or lent.device not in (arrays.CPU, arrays.CUDA_PINNED):
            raise errors.WrongCall("bad-tensor", name, -1, "a tensor that is published must be of "
                                   "float32, bfloat16 or float16, and on the host")
        parts.append(_dense_bytes(lent))
        header[name] = {"dtype": _TYPES[lent.dtype], "shape": list(lent.shape),
                        "data_offsets": [offset, offset + len(parts[-1])]}
        offset += len(parts[-1])
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return b"".join([len(text).to_bytes(8, "little"), text, *parts])


class Client:
    """A server at `url`. `key` is the one that loading adapters asks for, if any."""

    def __init__(self, url: str, key: Optional[str] = None, timeout: float = 60.0) -> None:
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise errors.WrongCall("bad-url", "url", -1,
                                   "%r is not http://HOST:PORT or https://HOST:PORT" % url)
        self._make = (http.client.HTTPSConnection if parts.scheme == "https"
                      else http.client.HTTPConnection)
        self._place, self._path = (parts.hostname, parts.port), parts.path.rstrip("/")
        self._key, self._timeout = key, timeout

    def request(self, method: str, path: str, body: Optional[bytes] = None,
                kind: str = "application/json") -> Any:
        """One request; its answer's JSON, or text. An answer that is an error is raised: Refused
        for 4xx (NotYet where it says to try again), with the server's code and words."""
        connection = self._make(*self._place, timeout=self._timeout)
        headers = {"Content-Type": kind} if body is not None else {}
        if self._key is not None:
            headers["Authorization"] = "Bearer " + self._key
        try:
            connection.request(method, self._path + path, body, headers)
            answer = connection.getresponse()
            data = answer.read()
        finally:
            connection.close()
        try:
            fields = json.loads(data)
        except ValueError:
            fields = data.decode("utf-8", "replace")
        if answer.status >= 400:
            raise _refusal(answer.status, answer.headers.get("Retry-After"), fields)
        return fields

    def publish(self, name: str, source: Any, config: Any = None, *, adapter: str = "default",
                expected_generation: int = 0, pinned: bool = False) -> Loaded:
        """Loads an adapter from memory under a name, or replaces the one of that name, between two
        steps of the server. `source` is a PeftModel, of which `adapter` is taken as it is now, or a
        mapping of names to tensors with its `config`. With expected_generation only while the name
        is at that generation."""
        tensors, config = published_parts(source, config, adapter)
        query: dict[str, str] = {}
        if expected_generation:
            query["expected_generation"] = str(expected_generation)
        if pinned:
            query["pinned"] = "true"
        path = "/v1/adapters/" + urllib.parse.quote(name, safe="")
        if query:
            path += "?" + urllib.parse.urlencode(query)
        fields = self.request("PUT", path, safetensors_bytes(tensors, config),
                              "application/octet-stream")
        return Loaded(fields["name"], fields["digest"], int(fields["generation"]),
                      fields["receipt"])

    def score(self, sequences: Sequence[Sequence[int]], model: Optional[str] = None, *,
              prompt_lengths: Union[int, Sequence[int]] = 1, **fields: Any) -> list[Scores]:
        """Logprobs of the tokens of each sequence from its prompt length on: bit for bit those that
        sampling gave. `adapter_digest` or `min_generation` make another version an error; with
        routed_experts=True each has the experts of its tokens as well."""
        body = {"sequences": [list(sequence) for sequence in sequences], "prompt_lengths":
                prompt_lengths if isinstance(prompt_lengths, int) else list(prompt_lengths),
                "encoding_format": "base64", **({"model": model} if model else {}), **fields}
        answer = self.request("POST", "/v1/score", json.dumps(body).encode())
        return [_scores(row) for row in answer["data"]]

    def unload(self, name: str) -> None:
        """Removes the name; requests that run on it finish."""
        self.request("POST", "/v1/unload_lora_adapter", json.dumps({"lora_name": name}).encode())

    def generate(self, prompt: Any, model: Optional[str] = None, **fields: Any) -> dict[str, Any]:
        """POST /v1/completions: its JSON. docs/HTTP.md lists the fields."""
        body = {"prompt": prompt, **({"model": model} if model else {}), **fields}
        answer: dict[str, Any] = self.request("POST", "/v1/completions", json.dumps(body).encode())
        return answer


def _scores(row: Mapping[str, Any]) -> Scores:
    raw = base64.b64decode(row["logprobs"])
    scores = Scores(struct.unpack("<%df" % (len(raw) // 4), raw))
    if "routed_experts" in row:
        scores.routed_experts = memoryview(base64.b64decode(row["routed_experts"])).cast(
            "H", row["routed_experts_shape"])
    return scores


def _refusal(status: int, retry: Optional[str], fields: Any) -> errors.SidepathError:
    """The exception for an answer of the server."""
    error = fields.get("error", {}) if isinstance(fields, dict) else {"message": str(fields)}
    if not isinstance(error, dict):
        error = {"message": str(error)}
    kind = errors.NotYet if retry or status in (409, 429, 503) else (
        errors.Refused if status < 500 else errors.SidepathError)
    return kind(str(error.get("code") or "http-%d" % status), str(error.get("param") or ""), -1,
                str(error.get("message", "")), -status, "HTTP %d" % status)
