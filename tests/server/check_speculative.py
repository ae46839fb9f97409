#!/usr/bin/env python3
"""Drafts over HTTP: the same bytes with `speculative` true and false, in completions, chats and
streams, and the figures of what was drafted.
    check_speculative.py SIDEPATH [CHECK..]"""

import json
import re
import sys
import threading

import serving
from serving import ADAPTERS, get, post, run_checks, until

REPEATING = "int main(void)\n{\n    return 0;\n}\n\nint main(void)\n{\n    return"
COMPLETIONS = [
    {"model": "csource", "prompt": REPEATING, "max_tokens": 32, "temperature": 0, "logprobs": 3},
    {"model": "scripture", "prompt": ["In the beginning", "And the"], "max_tokens": 12, "seed": 5,
     "n": 2, "temperature": 0.7},
    {"model": "base", "prompt": REPEATING, "max_tokens": 30, "temperature": 0, "stop": [";\n}"],
     "frequency_penalty": 0.3, "echo": True},
    {"model": "sqldoc", "prompt": REPEATING, "max_tokens": 24, "temperature": 0, "min_tokens": 12,
     "repetition_penalty": 1.1, "logit_bias": {"9": 2}, "seed": 1},
]
CHAT = {"model": "csource", "messages": [{"role": "user", "content": REPEATING}], "logprobs": True,
        "top_logprobs": 2, "max_tokens": 20, "temperature": 0.5, "seed": 9, "n": 2}


def flags():
    return ["--adapter-dir", ADAPTERS, "--max-loras", "2", "--adapter-wait-steps", "4",
            "--adapter-preempt-steps", "8"]


def asked(server, path, body, speculative):
    answer = post(server, path, {**body, "speculative": speculative})
    assert answer.status == 200, answer.bytes
    return answer.json


def details_of(usage):
    return usage.get("completion_tokens_details")


def totals_of(server):
    text = get(server, "/metrics").bytes.decode()
    return [int(re.search(r"^sidepath_%s_total (\d+)$" % name, text, re.M).group(1))
            for name in ("drafted_tokens", "accepted_tokens", "verify_steps")]


def check_speculative_answers(binary):
    """Every answer with drafts is the one without; usage and metrics count the same drafts."""
    with serving.serving(binary, *flags()) as server:
        bodies = [("/v1/completions", body) for body in COMPLETIONS]
        bodies.append(("/v1/chat/completions", CHAT))
        plain = [asked(server, path, body, False) for path, body in bodies]
        assert totals_of(server) == [0, 0, 0]
        assert all(details_of(answer["usage"]) is None for answer in plain)
        drafted = [None] * len(bodies)

        def ask(i):
            drafted[i] = asked(server, *bodies[i], True)

        threads = [threading.Thread(target=ask, args=(i,)) for i in range(len(bodies))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        sums = [0, 0, 0]
        for was, now in zip(plain, drafted):
            assert was["choices"] == now["choices"], (was, now)
            figures = details_of(now["usage"])
            if figures is None:
                continue
            accepted, rejected = (figures[kind + "_prediction_tokens"]
                                  for kind in ("accepted", "rejected"))
            assert accepted <= now["usage"]["completion_tokens"]
            for k, count in enumerate((accepted + rejected, accepted, figures["verify_steps"])):
                sums[k] += count
        assert sums == totals_of(server) and sums[0] >= sums[1] > 0, (sums, totals_of(server))


def check_speculative_streams(binary):
    """A stream, with drafts as the default; one whose client leaves in the middle."""
    with serving.serving(binary, *flags(), "--speculative", "--draft-tokens", "8") as server:
        body = {**COMPLETIONS[0], "return_token_ids": True}
        whole = asked(server, "/v1/completions", body, False)
        events = post(server, "/v1/completions", {
            **body, "stream": True, "stream_options": {"include_usage": True}}).events()
        last = events.pop()
        ids = [i for event in events for c in event["choices"] for i in c["token_ids"]]
        text = "".join(c["text"] for event in events for c in event["choices"])
        assert ids == whole["choices"][0]["token_ids"]
        assert text == whole["choices"][0]["text"]
        assert details_of(last["usage"])["verify_steps"] > 0, last
        drafted = totals_of(server)[0]
        with server.connect() as sock:
            data = json.dumps({**body, "max_tokens": 1200, "ignore_eos": True,
                               "stream": True}).encode()
            sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: "
                         b"application/json\r\nContent-Length: %d\r\n\r\n" % len(data) + data)
            until(lambda: totals_of(server)[0] > drafted + 8)
        until(lambda: get(server, "/status.json").json["queue"]["running"] == 0)
        again = post(server, "/v1/completions", body).json
        assert again["choices"] == whole["choices"]


def model_totals_of(server):
    text = get(server, "/metrics").bytes.decode()
    return [float(re.search(r"^sidepath_draft_model_%s_total (\S+)$" % name, text, re.M).group(1))
            for name in ("tokens", "accepted_tokens", "seconds")]


def check_draft_model(binary):
    """A text that does not repeat itself is drafted by a model: the base itself, which is right for
    the base's requests, and often for an adapter's."""
    with serving.serving(binary, *flags(), "--draft-model", serving.BASE) as server:
        bodies = [{"model": name, "prompt": "And it came to pass", "max_tokens": 24, "seed": 3,
                   "temperature": 1, "ignore_eos": True, "logprobs": 2}
                  for name in ("base", "scripture")]
        for body in bodies:
            plain = asked(server, "/v1/completions", body, False)
            before = model_totals_of(server)
            now = asked(server, "/v1/completions", body, True)
            assert plain["choices"] == now["choices"], (plain, now)
            drafted, accepted, seconds = (a - b for a, b in zip(model_totals_of(server), before))
            assert drafted >= accepted > 0 and seconds > 0, (drafted, accepted, seconds)
            if body["model"] == "base":
                assert drafted == accepted
        memory = get(server, "/status.json").json["memory"]
        assert memory["draft_model"] > memory["weights"] > 0, memory


CHECKS = [check_speculative_answers, check_speculative_streams, check_draft_model]

if __name__ == "__main__":
    run_checks([c for c in CHECKS if len(sys.argv) < 3 or c.__name__ in sys.argv[2:]], sys.argv[1])
