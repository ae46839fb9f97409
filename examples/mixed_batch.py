#!/usr/bin/env python3
"""A stock transformers model that answers with three adapters and the base in one batch:

    pip install ./bindings/python torch transformers
    examples/mixed_batch.py [BASE [ADAPTERS]]

BASE is a model's directory, ADAPTERS a folder of adapters for it; without them the demo's. The rows
of the base have the bytes of the bare model, which the program checks."""

import sys
from pathlib import Path

import torch
import transformers

import sidepath.transformers

DEMO = Path(__file__).resolve().parents[1] / "demo"


def main():
    base = Path(sys.argv[1]) if len(sys.argv) > 1 else DEMO / "base"
    folder = Path(sys.argv[2]) if len(sys.argv) > 2 else DEMO / "adapters"
    tokenizer = transformers.AutoTokenizer.from_pretrained(base, padding_side="left")
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype="auto").eval()
    names = sorted(path.name for path in folder.iterdir() if path.is_dir())
    prompts = ["In the morning"] * (len(names) + 1)
    inputs = tokenizer(prompts, return_tensors="pt")
    settings = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 0}
    with torch.no_grad():
        bare = model(**inputs).logits[0]

    with sidepath.transformers.attach(model, slots=8) as host:
        for name in names:
            try:
                print("%s: %s" % (name, host.load(name, folder / name)))
            except sidepath.Refused as refusal:  # what does not fit is said, and served never
                sys.exit("%s: %s" % (name, refusal))
        tokens = model.generate(**inputs, **settings, adapters=[None, *names])
        with torch.no_grad(), host.batch([None, *names]):
            mixed = model(**inputs).logits[0]
    for name, text in zip(["base", *names], tokenizer.batch_decode(tokens)):
        print("\n[%s] %s" % (name, text))
    same = torch.equal(bare.view(torch.uint8), mixed.view(torch.uint8))
    print("\nbytes of the base's row as without the adapters: %s" % same)
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
