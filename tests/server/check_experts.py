#!/usr/bin/env python3
"""Adapters of routers and experts as clients load them: what `inspect` says of one is what a load
says, with the same settings, and a text that names a setting names one that the server has.
    check_experts.py SIDEPATH [CHECK..]"""

import contextlib
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import serving
from serving import get, post, run_checks

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures"
MODEL = FIXTURES / "qwen3moe"
ADAPTERS = MODEL / "adapters"
PROMPT = [5, 200, 31, 77, 400, 12, 9]


@contextlib.contextmanager
def moe_serving(binary, *flags):
    """A server of the fixture with experts, which has no tokenizer of its own."""
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "base"
        shutil.copytree(MODEL, model, ignore=shutil.ignore_patterns("adapters", "golden"))
        for file in (FIXTURES / "tokenizer512").iterdir():
            shutil.copy(file, model)
        with serving.serving(binary, "--adapter-dir", ADAPTERS, "--precision", "f32", *flags,
                             model=model) as server:
            yield server


def load(server, name):
    return post(server, "/v1/load_lora_adapter", {"lora_name": name, "lora_path": name})


def text(server, model):
    answer = post(server, "/v1/completions", {"model": model, "prompt": PROMPT, "max_tokens": 8,
                                              "temperature": 0, "ignore_eos": True,
                                              "return_token_ids": True})
    assert answer.status == 200, answer.bytes
    return answer.json["choices"][0]["token_ids"]


def inspect(binary, name, *flags):
    done = subprocess.run([str(binary), "inspect", str(ADAPTERS / name), "--model", str(MODEL),
                           "--precision", "f32", "--json", *flags],
                          capture_output=True, text=True, check=False)
    return json.loads(done.stdout)


def check_experts_over_http(binary):
    """Loaded, applied, replaced and taken away; the receipt says what it takes."""
    names = ["experts-fused", "all-linear", "router", "v4-sparse-experts"]
    with moe_serving(binary, "--max-loras", 2, "--expert-bytes", 1 << 20) as server:
        base = text(server, "base")
        texts = {}
        for name in names:
            answer = load(server, name)
            assert answer.status == 200, (name, answer.bytes)
            texts[name] = text(server, name)
        assert all(texts[name] != base for name in names), texts
        listed = {a["name"]: a for a in get(server, "/v1/lora_adapters").json["data"]}
        for name in names:
            verdict = inspect(binary, name)
            assert verdict["verdict"] == "accepted" and verdict["expert_bytes"] > 0, verdict
            receipt = listed[name]["receipt"]
            assert [receipt[key] for key in ("digest", "rank", "row_macs", "expert_bytes")] == [
                verdict[key] for key in ("digest", "rank", "row_macs", "expert_bytes")], receipt
        # Two slots for four adapters: each comes back with both of its parts.
        for name in names + names[::-1]:
            assert text(server, name) == texts[name], name
        assert text(server, "base") == base


def check_experts_refused(binary):
    """The same refusal from inspect and from a load, each with its setting."""
    cases = [(["--no-experts"], "router", "experts-disabled"),
             (["--max-lora-expert-rank", "3"], "experts-fused", "expert-rank-exceeds-cap"),
             (["--expert-layout", "swapped"], "experts-fused", "shape-mismatch")]
    for flags, name, code in cases:
        verdict = inspect(binary, name, *flags)
        assert (verdict["verdict"], verdict["code"]) == ("refused", code), verdict
        with moe_serving(binary, *flags) as server:
            answer = load(server, name)
            assert (answer.status, answer.code) == (400, code), answer.bytes
            assert text(server, "base")
    with moe_serving(binary, "--expert-bytes", 4096) as server:
        answer = load(server, "experts-fused")
        assert (answer.status, answer.code) == (400, "experts-too-large"), answer.bytes
        assert "expert-bytes" in answer.json["error"]["message"]
        assert load(server, "plain-r8").status == 200
        assert text(server, "plain-r8")


CHECKS = [check_experts_over_http, check_experts_refused]


if __name__ == "__main__":
    run_checks([c for c in CHECKS if len(sys.argv) < 3 or c.__name__ in sys.argv[2:]], sys.argv[1])
