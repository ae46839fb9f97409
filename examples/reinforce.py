#!/usr/bin/env python3
"""Reinforcement learning with a new adapter every step, in one process: torch and PEFT train, the
engine samples, and each step's weights are published from memory, in milliseconds and without a
file. What is learned: lines with many vowels. Each step prints the reward, the divergence between
the sampler and the trainer (how far the probabilities of one differ from those of the other for the
same weights), and the times.

    pip install ./bindings/python torch transformers peft
    examples/reinforce.py [STEPS]
    examples/reinforce.py [STEPS] http://127.0.0.1:8000     # a server of the demo's base samples

The server: sidepath serve --model demo/base --max-lora-rank 8 --allow-no-effect"""

import sys
import time
from pathlib import Path

import peft
import torch
import transformers

import sidepath

BASE = Path(__file__).resolve().parents[1] / "demo/base"
PROMPTS = ["In the morning", "It was said that", "The people of the", "When they came"] * 8
TOKENS = 20
NAME = "policy"


class InProcess:
    """Samples of the engine in this process, in float32 as the trainer has it."""

    def __init__(self):
        self.engine = sidepath.Engine(BASE, device="cpu", precision="f32", max_lora_rank=8,
                                      allow_no_effect=True, max_context=128, threads=1)
        self.publish = self.engine.publish

    def sample(self, seed):
        done = self.engine.generate(PROMPTS, NAME, max_tokens=TOKENS, temperature=1.0, seed=seed,
                                    logprobs=True, ignore_eos=True)
        return [(c.prompt_tokens, c.tokens, c.logprobs, c.text, c.adapter_digest) for c in done]


class OverHttp:
    """The same from a server."""

    def __init__(self, url):
        self.client = sidepath.Client(url)
        self.publish = self.client.publish

    def sample(self, seed):
        answer = self.client.generate(PROMPTS, NAME, max_tokens=TOKENS, temperature=1.0, seed=seed,
                                      logprobs=0, ignore_eos=True, return_token_ids=True)
        return [(c["prompt_token_ids"], c["token_ids"], c["logprobs"]["token_logprobs"], c["text"],
                 answer["adapter_digest"]) for c in answer["choices"]]


def reward(text):
    """The share of its letters that are vowels."""
    letters = [letter for letter in text.lower() if letter.isalpha()]
    return sum(letter in "aeiou" for letter in letters) / max(len(letters), 1)


def trainer_logprobs(model, samples):
    """[samples, TOKENS]: what the trainer says of the sampled tokens."""
    width = max(len(prompt) for prompt, *_ in samples) + TOKENS
    ids = torch.zeros(len(samples), width, dtype=torch.int64)
    for row, (prompt, tokens, *_) in enumerate(samples):
        ids[row, :len(prompt) + TOKENS] = torch.tensor(prompt + tokens)
    mask = (torch.arange(width) < torch.tensor([[len(p) + TOKENS] for p, *_ in samples])).long()
    logprobs = model(ids, attention_mask=mask).logits[:, :-1].log_softmax(-1)
    chosen = logprobs.gather(-1, ids[:, 1:, None])[..., 0]
    return torch.stack([chosen[row, len(prompt) - 1:len(prompt) - 1 + TOKENS]
                        for row, (prompt, *_) in enumerate(samples)])


def main():
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 20
    torch.manual_seed(0)
    base = transformers.AutoModelForCausalLM.from_pretrained(BASE, dtype=torch.float32)
    model = peft.get_peft_model(base, peft.LoraConfig(
        r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM"))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3)
    sampler = OverHttp(sys.argv[2]) if len(sys.argv) > 2 else InProcess()
    for step in range(steps):
        begin = time.perf_counter()
        published = sampler.publish(NAME, model)
        publish_ms = 1e3 * (time.perf_counter() - begin)
        samples = sampler.sample(seed=1000 * step)
        assert {digest for *_, digest in samples} == {published.digest}
        rewards = torch.tensor([reward(text) for *_, text, _ in samples])
        ours = trainer_logprobs(model, samples)
        theirs = torch.tensor([logprobs for _, _, logprobs, *_ in samples])
        ratio = ours.detach() - theirs
        divergence = (ratio.exp() - 1 - ratio).mean()  # of the sampler from the trainer, above 0
        advantage = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
        loss = -(advantage[:, None] * ours).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print("step %2d  reward %.3f  KL %.2e  publish %4.0f ms  step %.1f s  %s" % (
            step, rewards.mean(), divergence, publish_ms, time.perf_counter() - begin,
            published.digest[:12]), flush=True)


if __name__ == "__main__":
    main()
