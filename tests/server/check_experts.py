#!/usr/bin/env python3
"""Adapters of routers and experts as clients load them: what `inspect` says of one is what a load
says, with the same settings, and a text that names a setting names one that the server has.
    check_experts.py SIDEPATH [CHECK..]"""

import contextlib
import json
import random
import shutil
import struct
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
def moe_serving(binary, *flags, change=None, adapters=ADAPTERS):
    """A server of the fixture with experts, which has no tokenizer of its own. `change` is called
    with the folder of the base."""
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "base"
        shutil.copytree(MODEL, model, ignore=shutil.ignore_patterns("adapters", "golden"))
        for file in (FIXTURES / "tokenizer512").iterdir():
            shutil.copy(file, model)
        if change is not None:
            change(model)
        with serving.serving(binary, "--adapter-dir", adapters, "--precision", "f32", *flags,
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


def inspect(binary, name, *flags, model=MODEL):
    done = subprocess.run([str(binary), "inspect", str(ADAPTERS / name), "--model", str(model),
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


# ---- what the shapes cannot tell -----------------------------------------------------------------

HIDDEN, INNER, EXPERTS, RANK = 64, 32, 8, 2  # gate_up is as wide as it is deep


def narrowed(name, entry, data):
    """Experts of INNER: the first rows of gate and up, the first columns of down."""
    rows, columns = entry["shape"] if len(entry["shape"]) == 2 else (0, 0)
    if ".experts." not in name:
        return entry, data
    if "down_proj" not in name:
        return {**entry, "shape": [INNER, columns]}, data[:INNER * columns * 2]
    cut = b"".join(data[2 * columns * row:2 * (columns * row + INNER)] for row in range(rows))
    return {**entry, "shape": [rows, INNER]}, cut


def narrow(model):
    for shard in model.glob("*.safetensors"):
        raw = shard.read_bytes()
        size = int.from_bytes(raw[:8], "little")
        header, body = json.loads(raw[8:8 + size]), b""
        for name, entry in header.items():
            if name != "__metadata__":
                begin, end = (8 + size + offset for offset in entry["data_offsets"])
                entry, data = narrowed(name, entry, raw[begin:end])
                header[name] = {**entry, "data_offsets": [len(body), len(body) + len(data)]}
                body += data
        text = json.dumps(header).encode()
        shard.write_bytes(len(text).to_bytes(8, "little") + text + body)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "moe_intermediate_size": INNER}))


def write_fused(folder, a, b, **more):
    """gate_up of one layer: a[expert][rank] rows of A, b[expert][rank] columns of B."""
    rows = [a[expert][rank] for expert in range(EXPERTS) for rank in range(RANK)]
    columns = [b[expert][rank] for rank in range(RANK) for expert in range(EXPERTS)]
    data = [x for row in rows for x in row]
    data += [column[i] for i in range(HIDDEN) for column in columns]
    half = 4 * EXPERTS * RANK * HIDDEN
    name = "base_model.model.model.layers.1.mlp.experts.lora_%s.weight"
    header = {name % "A": {"dtype": "F32", "shape": [EXPERTS * RANK, HIDDEN],
                           "data_offsets": [0, half]},
              name % "B": {"dtype": "F32", "shape": [HIDDEN, RANK * EXPERTS],
                           "data_offsets": [half, 2 * half]}}
    text = json.dumps(header).encode()
    folder.mkdir()
    (folder / "adapter_model.safetensors").write_bytes(
        len(text).to_bytes(8, "little") + text + struct.pack("<%df" % len(data), *data))
    (folder / "adapter_config.json").write_text(json.dumps({
        "peft_type": "LORA", "r": RANK, "lora_alpha": 2 * RANK, "target_modules": [],
        "target_parameters": ["mlp.experts.gate_up_proj"], **more}))


def check_experts_ambiguous(binary):
    """A fused file of a square parameter, which a setting has to tell: the reading that PEFT 0.18
    wrote is the other one of the exchanged file."""
    draw = random.Random(7)
    a, b = ([[[draw.uniform(-0.5, 0.5) for _ in range(HIDDEN)] for _ in range(RANK)]
             for _ in range(EXPERTS)] for _ in range(2))
    with tempfile.TemporaryDirectory() as folder:
        adapters, model = Path(folder) / "adapters", Path(folder) / "base"
        adapters.mkdir()
        write_fused(adapters / "square", a, b)
        write_fused(adapters / "square-linear", a, b, peft_version="0.21.0")
        write_fused(adapters / "square-swapped", b, a, peft_version="0.21.0")
        shutil.copytree(MODEL, model, ignore=shutil.ignore_patterns("adapters", "golden"))
        narrow(model)
        texts = {}
        for layout in "auto", "linear", "swapped":
            flags = "--expert-layout", layout
            verdict = inspect(binary, adapters / "square", *flags, model=model)
            with moe_serving(binary, *flags, "--expert-bytes", 1 << 20, change=narrow,
                             adapters=adapters) as server:
                answer = load(server, "square")
                if layout == "auto":
                    assert (answer.status, answer.code) == (400, "ambiguous-expert-layout")
                    assert verdict["code"] == "ambiguous-expert-layout", verdict
                    for told in answer.json["error"]["message"], verdict["message"]:
                        assert "expert-layout" in told, told
                    for name in "square-linear", "square-swapped":
                        answer = load(server, name)
                        assert answer.status == 200, answer.bytes
                        texts[name] = logprobs(server, name)
                    texts["base"] = logprobs(server, "base")
                else:
                    assert answer.status == 200, answer.bytes
                    assert verdict["verdict"] == "accepted", verdict
                    listed = get(server, "/v1/lora_adapters").json["data"]
                    assert [a["digest"] for a in listed if a["name"] == "square"] == [
                        verdict["digest"]], listed
                    assert logprobs(server, "square") == texts["square-" + layout], layout
        assert len(set(map(str, texts.values()))) == 3


def logprobs(server, model):
    answer = post(server, "/v1/score", {"model": model, "sequences": [PROMPT]})
    assert answer.status == 200, answer.bytes
    return answer.json["data"][0]["logprobs"]


CHECKS = [check_experts_over_http, check_experts_refused, check_experts_ambiguous]


if __name__ == "__main__":
    run_checks([c for c in CHECKS if len(sys.argv) < 3 or c.__name__ in sys.argv[2:]], sys.argv[1])
