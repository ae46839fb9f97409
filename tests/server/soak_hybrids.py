#!/usr/bin/env python3
"""Hybrids under load over HTTP: prompts with common beginnings, four adapters and the base through
two slots, with few KV pages, few recurrent states and few snapshots, so that requests are preempted
and resumed, adapters rotate and snapshots are replaced; some have drafts, also of a model with
states of its own. Each answer has the tokens of a server with room for all, without snapshots;
afterwards no state is held.
    soak_hybrids.py SIDEPATH [REQUESTS] [SEED]"""

import collections
import concurrent.futures
import random
import sys

from check_hybrids import complete, hybrid_serving, metric
from serving import post, until

ADAPTERS = ["gdn-in", "gdn-out", "attn-r4", "plain-r8"]
VOCAB = 509
STEMS, STEM, CASES = 4, 200, 60
ROOM = ["--max-running", 4, "--kv-tokens", 8192, "--state-snapshot-tokens", 0]
LITTLE = ["--no-access-log", "--max-loras", 2, "--max-running", 8, "--kv-tokens", 1280,
          "--prefill-chunk", 48, "--state-snapshot-tokens", 64, "--adapter-wait-steps", 4,
          "--adapter-preempt-steps", 16]
DRAFTER = "qwen35"
# Of states and snapshots, the draft model's with them: for some of the requests.
BYTES = {"qwen3next": (1500000, 700000), "qwen35": (1400000, 600000),
         "qwen35moe-vl": (1400000, 600000)}


def make_cases(rng):
    stems = [[rng.randrange(VOCAB) for _ in range(STEM)] for _ in range(STEMS)]
    cases = []
    for i in range(CASES):
        prompt = stems[i % STEMS][:rng.randrange(30, STEM + 1)]
        prompt += [rng.randrange(VOCAB) for _ in range(rng.randrange(2, 30))] * 2  # has drafts
        fields = {"max_tokens": rng.randrange(4, 40)}
        if i % 3 == 1:
            fields.update(temperature=0.9, seed=i)
        cases.append((rng.choice([*ADAPTERS, "base"]), prompt, fields))
    return cases


def load_adapters(server):
    for adapter in ADAPTERS:
        answer = post(server, "/v1/load_lora_adapter", {"lora_name": adapter, "lora_path": adapter})
        assert answer.status == 200, answer.bytes


def ask(server, case, drafts):
    model, prompt, fields = case
    return complete(server, model, prompt, **fields, **({"speculative": True} if drafts else {}))


def soak(binary, name, requests, seed):
    rng = random.Random(seed)
    cases = make_cases(rng)
    with hybrid_serving(binary, name, *ROOM) as server:
        load_adapters(server)
        expected = [ask(server, case, False) for case in cases]
    states, snapshots = BYTES[name]
    counts = collections.Counter()
    with hybrid_serving(binary, name, *LITTLE, "--state-bytes", states, "--state-snapshot-bytes",
                        snapshots, drafter=DRAFTER) as server:
        load_adapters(server)
        picks = [(rng.randrange(CASES), rng.random() < 0.3) for _ in range(requests)]
        with concurrent.futures.ThreadPoolExecutor(16) as pool:
            found = pool.map(lambda pick: ask(server, cases[pick[0]], pick[1]), picks)
            for (i, drafts), tokens in zip(picks, found):
                assert tokens == expected[i], (name, cases[i], drafts, tokens, expected[i])
        until(lambda: metric(server, 'sidepath_states{state="used"}') == 0)
        for what in ("sidepath_preemptions_total", "sidepath_rotations_total",
                     "sidepath_prefix_cache_tokens_total", "sidepath_drafted_tokens_total",
                     "sidepath_draft_model_tokens_total",
                     "sidepath_state_snapshots_written_total"):
            counts[what] = int(metric(server, what))
            assert counts[what] > 0, what
        kept = sum(metric(server, 'sidepath_state_snapshots{state="%s"}' % state)
                   for state in ("cached", "free"))
        assert counts["sidepath_state_snapshots_written_total"] > 3 * kept > 0
        free = metric(server, 'sidepath_states{state="free"}')
        assert 0 < free < 8, free
    print("%s, seed %d, %d requests, %d states, %d snapshots: %s" %
          (name, seed, requests, free, kept, dict(counts)))


def main():
    requests = int(sys.argv[2]) if len(sys.argv) > 2 else 2000
    seed = int(sys.argv[3]) if len(sys.argv) > 3 else 1
    for name in BYTES:
        soak(sys.argv[1], name, requests, seed)


if __name__ == "__main__":
    main()
