#!/usr/bin/env python3
"""Hybrids over HTTP: the tokens are those of transformers and PEFT in double precision, with any
chunk of the prompt, beside other requests and with drafts, those of a draft model with a state of
its own among them; and the start says what is not used.
    check_hybrids.py SIDEPATH [CHECK..]"""

import concurrent.futures
import contextlib
import json
import shutil
import struct
import sys
import tempfile
from pathlib import Path

import serving
from serving import get, post, run_checks

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures"
MODELS = {"qwen3next": ["gdn-in", "all-linear", "v4-router"],
          "qwen35": ["gdn-all-attn", "gdn-out", "tokens"],
          "qwen35moe-vl": ["shared-expert", "text-trunk"]}
LOGIT_ERROR = 1e-3  # as in the README of the fixtures
FLAGS = ["--prefill-chunk", 7, "--expert-bytes", 4000000, "--overlay-bytes", 4000000]


def copy_with_tokenizer(name, model):
    shutil.copytree(FIXTURES / name, model, ignore=shutil.ignore_patterns("adapters", "golden"))
    for file in (FIXTURES / "tokenizer512").iterdir():
        shutil.copy(file, model)


@contextlib.contextmanager
def hybrid_serving(binary, name, *flags, drafter=None):
    """A server of a fixture, which has no tokenizer of its own, with another as its draft model."""
    with tempfile.TemporaryDirectory() as folder:
        model, draft = Path(folder) / "base", Path(folder) / "draft"
        copy_with_tokenizer(name, model)
        if drafter:
            copy_with_tokenizer(drafter, draft)
            flags = (*flags, "--draft-model", draft)
        with serving.serving(binary, "--adapter-dir", FIXTURES / name / "adapters", "--precision",
                             "f32", *flags, model=model) as server:
            yield server


def golden(name, adapter, prompt):
    """The greedy tokens, up to the first that an allowed error could change."""
    with open(FIXTURES / name / "golden" / f"{adapter}.safetensors", "rb") as file:
        data = file.read()
    length = struct.unpack_from("<Q", data)[0]
    header = json.loads(data[8:8 + length])

    def values(tensor, letter):
        begin, end = header[tensor]["data_offsets"]
        body = data[8 + length + begin:8 + length + end]
        wide = "q" if header[tensor]["dtype"] == "I64" else letter
        return struct.unpack(f"<{len(body) // struct.calcsize(wide)}{wide}", body)

    margins = values(f"greedy_margin_p{prompt}", "f")
    safe = next((i for i, m in enumerate(margins) if m <= 2 * LOGIT_ERROR), len(margins))
    return list(values(f"greedy_p{prompt}", "i"))[:safe]


def complete(server, model, prompt, **fields):
    answer = post(server, "/v1/completions", {
        "model": model, "prompt": prompt, "max_tokens": 24, "temperature": 0, "ignore_eos": True,
        "return_token_ids": True, **fields})
    assert answer.status == 200, answer.bytes
    return answer.json["choices"][0]["token_ids"]


def metric(server, name):
    text = get(server, "/metrics").bytes.decode()
    return next(float(line.split()[-1]) for line in text.splitlines()
                if line.startswith(name + " "))


def check_golden_tokens(binary):
    """All adapters and prompts of a model at once, twice, and with drafts."""
    for name, adapters in MODELS.items():
        with open(FIXTURES / name / "prompts.json", encoding="ascii") as file:
            prompts = json.load(file)["prompts"]
        with hybrid_serving(binary, name, *FLAGS, drafter="qwen35") as server:
            for adapter in adapters:
                answer = post(server, "/v1/load_lora_adapter",
                              {"lora_name": adapter, "lora_path": adapter})
                assert answer.status == 200, answer.bytes
            cases = [(adapter, p) for adapter in ["base", *adapters] for p in range(3)] * 2
            with concurrent.futures.ThreadPoolExecutor(8) as pool:
                found = list(pool.map(
                    lambda c: complete(server, c[0], prompts[c[1]]), cases))
            for (adapter, p), tokens in zip(cases, found):
                wanted = golden(name, adapter, p)
                assert tokens[:len(wanted)] == wanted, (name, adapter, p, tokens, wanted)
            half = len(cases) // 2
            assert found[:half] == found[half:]
            for (adapter, p), tokens in zip(cases[:half], found):
                assert complete(server, adapter, prompts[p], speculative=True) == tokens
            assert metric(server, "sidepath_draft_model_tokens_total") > 0
            used = "weights that nothing uses: model.visual."
            assert any(used in line for line in server.log) == (name == "qwen35moe-vl")


CHECKS = [check_golden_tokens]


if __name__ == "__main__":
    run_checks([c for c in CHECKS if len(sys.argv) < 3 or c.__name__ in sys.argv[2:]], sys.argv[1])
