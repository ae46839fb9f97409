#!/usr/bin/env python3
"""Scores of given tokens are, bit for bit, those that sampling them gave: raw and processed, by one
sequence or many at a time, under any adapter, scale and parameters."""

import base64
import json
import struct
import sys

import publishing
import serving
from serving import post, run_checks

ADAPTERS = ("scripture", "csource", "sqldoc")
FLAGS = ("--max-loras", 4, "--max-lora-rank", 32)
PROMPTS = ("In the beginning", "int main(", "SELECT a FROM", "x")
# What tokens are drawn by; each with a seed of its own.
SAMPLINGS = (
    {"temperature": 0},
    {"temperature": 0, "repetition_penalty": 1.3, "presence_penalty": 0.5},
    {"temperature": 1},
    {"temperature": 0.7, "top_p": 0.9, "seed": 3},
    {"temperature": 1.3, "top_k": 20, "min_p": 0.02, "seed": 4},
    {"temperature": 0.9, "frequency_penalty": 0.7, "logit_bias": {"5": 3, "9": -2}, "seed": 5},
)


def bits(numbers):
    return struct.pack("<%df" % len(numbers), *numbers)


def sample(server, model, prompt, sampling, **more):
    body = {"model": model, "prompt": prompt, "max_tokens": 12, "ignore_eos": True, "logprobs": 0,
            "return_token_ids": True, "processed_logprobs": True, **sampling, **more}
    answer = post(server, "/v1/completions", body)
    assert answer.status == 200, answer.bytes
    return answer.json


def score(server, body):
    answer = post(server, "/v1/score", body)
    assert answer.status == 200, answer.bytes
    return answer.json


def check_score_equals_sampling(binary):
    """Every sampling, adapter and scale; sequences alone and together; both encodings."""
    with serving.serving(binary, *FLAGS, "--adapter-dir", serving.ADAPTERS) as server:
        for model in ("base",) + ADAPTERS:
            for number, sampling in enumerate(SAMPLINGS):
                more = {"lora_scale": 0.5} if number % 2 and model != "base" else {}
                made = [sample(server, model, prompt, sampling, **more) for prompt in PROMPTS]
                choices = [one["choices"][0] for one in made]
                body = {"model": model, **sampling, **more, "processed_logprobs": True,
                        "sequences": [c["prompt_token_ids"] + c["token_ids"] for c in choices],
                        "prompt_lengths": [len(c["prompt_token_ids"]) for c in choices]}
                body.pop("seed", None)
                scored = score(server, body)
                assert scored["adapter_digest"] == made[0]["adapter_digest"]
                assert scored["adapter_generation"] == made[0]["adapter_generation"]
                packed = score(server, dict(body, encoding_format="base64"))
                for choice, got, encoded in zip(choices, scored["data"], packed["data"]):
                    want = choice["logprobs"]
                    for ours, theirs in (("logprobs", "token_logprobs"),
                                         ("processed_logprobs", "processed_logprobs")):
                        assert bits(got[ours]) == bits(want[theirs]), (model, sampling, ours)
                        assert base64.b64decode(encoded[ours]) == bits(want[theirs])
                alone = score(server, dict(body, sequences=body["sequences"][1:2],
                                           prompt_lengths=body["prompt_lengths"][1]))
                assert alone["data"][0]["logprobs"] == scored["data"][1]["logprobs"]
                assert alone["data"][0]["processed_logprobs"] == \
                    scored["data"][1]["processed_logprobs"]


def check_score_processed(binary):
    """At temperature 1 without filters they are the raw ones, but for rounding; with a bias that
    leaves one token they are near 0; and the chance of what is kept is one."""
    with serving.serving(binary, *FLAGS) as server:
        plain = sample(server, "base", "The", {"temperature": 1, "seed": 1})["choices"][0]
        for raw, processed in zip(plain["logprobs"]["token_logprobs"],
                                  plain["logprobs"]["processed_logprobs"]):
            assert abs(raw - processed) < 2e-5, (raw, processed)
        forced = sample(server, "base", "The", {"temperature": 1, "logit_bias": {"7": 100}})
        assert forced["choices"][0]["token_ids"] == [7] * 12
        assert max(map(abs, forced["choices"][0]["logprobs"]["processed_logprobs"])) < 1e-6
        vocab = json.loads((serving.BASE / "config.json").read_text())["vocab_size"]
        kept = []
        for first in range(0, vocab, 256):
            tokens = range(first, min(vocab, first + 256))
            every = score(server, {"model": "base", "temperature": 0.8, "top_k": 7,
                                   "processed_logprobs": True, "prompt_lengths": 1,
                                   "sequences": [[1, token] for token in tokens]})
            kept += [one["processed_logprobs"][0] for one in every["data"]
                     if one["processed_logprobs"][0] > -9999]
        assert len(kept) == 7, kept
        assert abs(sum(2.718281828459045 ** one for one in kept) - 1) < 1e-5, kept


def check_score_versions(binary):
    """Under one version: another is a 409, for scores as for completions and chat."""
    config, weights = publishing.files_of("csource")
    with serving.serving(binary, *FLAGS) as server:
        first = publishing.publish(server, "a", config, weights).json
        second = publishing.publish(server, "a", config, publishing.with_bit(weights, 8, 2)).json
        bodies = (("/v1/score", {"sequences": [[1, 2, 3]]}),
                  ("/v1/completions", {"prompt": "x", "max_tokens": 1}),
                  ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}],
                                            "max_tokens": 1}),
                  ("/v1/responses", {"input": "x", "max_output_tokens": 1}))
        for path, body in bodies:
            for wish, status in (({"adapter_digest": second["digest"]}, 200),
                                 ({"min_generation": second["generation"]}, 200),
                                 ({"adapter_digest": first["digest"]}, 409),
                                 ({"min_generation": second["generation"] + 1}, 409),
                                 ({"adapter_digest": "12"}, 400),
                                 ({"adapter_digest": second["digest"].upper()}, 400),
                                 ({"min_generation": -1}, 400)):
                answer = post(server, path, {"model": "a", **body, **wish})
                assert answer.status == status, (path, wish, answer.bytes)
                if status == 200:
                    assert answer.json["adapter_digest"] == second["digest"], answer.bytes
                    assert answer.json["adapter_generation"] == second["generation"]
                if status == 409:
                    assert answer.code == "other-version", answer.bytes
        answer = post(server, "/v1/completions", {"model": "base", "prompt": "x", "max_tokens": 1,
                                                  "adapter_digest": second["digest"]})
        assert answer.status == 409, answer.bytes


def check_score_refusals(binary):
    with serving.serving(binary, *FLAGS) as server:
        for body, code in (({}, "invalid-value"),
                           ({"sequences": []}, "invalid-value"),
                           ({"sequences": [[]]}, "invalid-value"),
                           ({"sequences": [["a"]]}, "invalid-value"),
                           ({"sequences": [[1, 99999999]]}, "invalid-value"),
                           ({"sequences": [[1, 2]], "prompt_lengths": 3}, "invalid-value"),
                           ({"sequences": [[1, 2]], "prompt_lengths": [1, 1]}, "invalid-value"),
                           ({"sequences": [[1, 2]], "prompt_lengths": 0}, "invalid-value"),
                           ({"sequences": [[1]], "encoding_format": "hex"}, "invalid-value"),
                           ({"sequences": [[1]], "routed_experts": True}, "invalid-value"),
                           ({"sequences": [[1]], "prompt": "x"}, "unknown-field"),
                           ({"sequences": [[1]], "max_tokens": 1}, "unknown-field"),
                           ({"sequences": [[1] * 5000]}, "context_length_exceeded")):
            answer = post(server, "/v1/score", body)
            assert (answer.status, answer.code) == (400, code), (body, answer.bytes)
        one = score(server, {"sequences": [[1]]})
        assert one["data"][0]["logprobs"] == [] and one["adapter_digest"] is None


CHECKS = [check_score_equals_sampling, check_score_processed, check_score_versions,
          check_score_refusals]


if __name__ == "__main__":
    run_checks([c for c in CHECKS if len(sys.argv) < 3 or c.__name__ in sys.argv[2:]], sys.argv[1])
