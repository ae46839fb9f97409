#!/usr/bin/env python3
"""sidepath.transformers beside transformers and PEFT:

    bench/embed_transformers.py FIXTURES OUT.json [MODEL...]

Fixtures: every adapter by itself against PEFT's golden logits; then the base and all adapters with
all prompts in one padded batch, against the goldens again, and every call of the library made a
second time with one row at a time, whose bits must be those of the batch (transformers' own GEMMs
depend on the batch's shape, so bits of logits are counted, not required); then greedy generation
with all adapters in one batch. FIXTURES is a folder like tests/fixtures, whose index.json lists
models and adapters.
Architectures: tiny random models of other families, two adapters made by PEFT for each, and PEFT's
logits against those of one batch with both.
Ends with 1 where an adapter that must be served is not, or is wrong. By hand: needs torch,
transformers, peft, safetensors and the package (pip install ./bindings/python)."""

import json
import platform
import sys
import tempfile
import time
import warnings
from pathlib import Path

import cffi
import peft
import sidepath
import torch
import transformers
from safetensors.torch import load_file

DENSE = {"qwen3-bias", "qwen3-tied", "qwen3-untied", "llama3", "qwen2", "smollm"}
GOLDEN = ("logits_p0", "logits_p1", "logits_p2_last4")


def tolerance(model):
    return 1e-4 if model in DENSE else 1e-3


def needs_experts(folder):
    """Whether the file has router or expert tensors, which no pool holds yet."""
    file = folder / "adapter_model.safetensors"
    names = load_file(file) if file.exists() else []
    return any(".mlp.experts." in name or ".mlp.gate." in name for name in names)


def load_model(folder):
    whole = folder.name.endswith("-vl")
    kind = transformers.AutoModelForImageTextToText if whole else transformers.AutoModelForCausalLM
    return kind.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def error_of(logits, folder, adapter, prompt):
    golden = load_file(folder / "golden" / ((adapter or "base") + ".safetensors"))[GOLDEN[prompt]]
    return float((logits[-len(golden):] - golden).abs().max())


def attach(model, adapters):
    """The host with every module that an adapter may have, and these adapters (name: folder)."""
    places = sidepath.transformers._Places(model)
    tables = [site.module for site in places.geometry if site.kind in ("embedding", "head")
              and site.path in places.hooked]
    host = sidepath.transformers.attach(model, slots=max(1, len(adapters)), threads=1,
                                        modules=["all-linear", *tables], overlay_bytes=1 << 26)
    try:
        for name, path in adapters.items():
            host.load(name, path)
    except sidepath.SidepathError:
        host.close()
        raise
    return host


@torch.no_grad()
def alone(host, name, prompts):
    out = []
    for prompt in prompts:
        with host.batch([name]):
            out.append(host.model(torch.tensor([prompt]), use_cache=False).logits[0])
    return out


class Replay:
    """Makes every call again with one row, and counts rows whose bits are not the batch's."""

    def __init__(self, host, rows):
        self.host, self.rows, self.apply = host, rows, host._apply  # (row number, adapter)
        self.plans, self.calls, self.different = {}, 0, 0
        host._apply = self

    def plan(self, name):
        """A plan of one row; built inside the batch, which holds the versions."""
        if name not in self.plans:
            image = self.host._images.get(name)
            self.plans[name] = sidepath.Plan(1, self.host.pool.slots).build(
                self.host.pool, [(image and self.host.pool.find(image.digest), 1)])
        return self.plans[name]

    def __call__(self, plan, number, kind, x, after):
        before = after.clone()
        self.apply(plan, number, kind, x, after)
        for row, name in self.rows:
            y = before[row:row + 1].clone()
            self.apply(self.plan(name), number, kind, x[row:row + 1], y)
            self.calls += 1
            self.different += not same_bits(y, after[row:row + 1])


@torch.no_grad()
def mixed(host, names, prompts):
    """The logits of (name, prompt) in one batch, padded at the end, and its replay."""
    width = max(map(len, prompts))
    work = [(name, prompt) for name in names for prompt in range(len(prompts))]
    tokens = torch.zeros(len(work), width, dtype=torch.int64)
    mask = torch.zeros_like(tokens)
    rows = []
    for i, (name, prompt) in enumerate(work):
        n = len(prompts[prompt])
        tokens[i, :n], mask[i, :n] = torch.tensor(prompts[prompt]), 1
        rows += [(i * width + row, name) for row in range(n)]
    replay = Replay(host, rows)
    with host.batch([name for name, _ in work]):
        logits = host.model(tokens, attention_mask=mask, use_cache=False).logits
    del host._apply
    return {key: logits[i, :len(prompts[key[1]])] for i, key in enumerate(work)}, replay


@torch.no_grad()
def greedy(host, folder, names, prompts):
    """Steps of greedy generation, all adapters in one batch, that are the golden's: (same, all).
    A sequence ends at its golden's first near tie, where float32 may choose either token."""
    same = steps = 0
    for number, prompt in enumerate(prompts):
        with host.batch(names):
            tokens = host.model.generate(
                torch.tensor([prompt] * len(names)), do_sample=False, max_new_tokens=24,
                attention_mask=torch.ones(len(names), len(prompt)), eos_token_id=[],
                pad_token_id=0)
        for name, row in zip(names, tokens[:, len(prompt):]):
            golden = load_file(folder / "golden" / ((name or "base") + ".safetensors"))
            near = (golden["greedy_margin_p%d" % number] < 1e-3).nonzero()
            n = int(near[0]) if len(near) else len(row)
            equal = (row[:n] == golden["greedy_p%d" % number][:n]).int().cumprod(0).sum()
            same, steps = same + int(equal), steps + n
    return same, steps


def same_bits(a, b):
    return torch.equal(a.contiguous().view(torch.int32), b.contiguous().view(torch.int32))


def try_adapter(model, folder, name, prompts):
    """What one adapter gives in a pool of its own: a record, and its logits where it was served."""
    path = folder / "adapters" / name
    record = {"adapter": name}
    try:
        host = attach(model, {name: path})
    except sidepath.SidepathError as refusal:
        return dict(record, verdict="refused", code=refusal.code), None
    logits = alone(host, name, prompts)
    host.close()
    errors = [error_of(logits[prompt], folder, name, prompt) for prompt in range(len(prompts))]
    return dict(record, verdict="served", max_abs_error=max(errors)), logits


def run_model(folder, adapters):
    prompts = json.loads((folder / "prompts.json").read_text())["prompts"]
    model, records, served = load_model(folder), [], {}
    for name, entry in sorted(adapters.items()):
        record, logits = try_adapter(model, folder, name, prompts)
        record.update(expect=entry["expect"], experts=needs_experts(folder / "adapters" / name))
        records.append(record)
        if logits:
            served[name] = logits
    host = attach(model, {name: folder / "adapters" / name for name in served})
    served[None] = alone(host, None, prompts)
    together, replay = mixed(host, list(served), prompts)
    same, steps = greedy(host, folder, list(served), prompts)
    host.close()
    error = max(error_of(logits, folder, *key) for key, logits in together.items())
    equal = sum(same_bits(logits, served[name][prompt]) for (name, prompt), logits in
                together.items())
    return {"model": folder.name, "class": type(model).__name__,
            "tolerance": tolerance(folder.name), "adapters": records,
            "greedy": {"steps": steps, "steps_as_the_golden": same},
            "mixed": {"sequences": len(together), "max_abs_error": error,
                      "sequences_with_the_bits_of_alone": equal,
                      "replayed_rows": replay.calls, "replayed_rows_that_differ": replay.different}}


def failures(result):
    for record in result["adapters"]:
        if record["verdict"] == "served":
            wrong = record["max_abs_error"] > result["tolerance"] or record["experts"]
        elif record["experts"]:
            wrong = record["code"] != "experts-disabled"
        else:
            wrong = record["expect"] == "load"
        if wrong:
            yield record
    greedy_run, mixed_run = result["greedy"], result["mixed"]
    if greedy_run["steps"] != greedy_run["steps_as_the_golden"]:
        yield greedy_run
    if mixed_run["max_abs_error"] > result["tolerance"] or mixed_run["replayed_rows_that_differ"]:
        yield mixed_run


# ---- architectures ------------------------------------------------------------------------------

SMALL = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
         "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
LATENT = {"num_key_value_heads": 4, "moe_intermediate_size": 32, "n_routed_experts": 4,
          "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2, "q_lora_rank": 24,
          "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16,
          "first_k_dense_replace": 1}
# Model type, fields of its config, target modules of the adapters.
ARCHITECTURES = [
    ("bloom", {"n_layer": 2, "n_head": 4}, "all-linear"),
    ("cohere", {"logit_scale": 1.0}, "all-linear"),
    ("deepseek_v3", LATENT, ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]),
    ("falcon", {}, "all-linear"),
    ("gemma2", {"head_dim": 16}, "all-linear"),
    ("gemma3_text", {"head_dim": 16}, "all-linear"),
    ("glm4", {"head_dim": 16}, "all-linear"),
    ("gpt2", {"n_embd": 64, "n_layer": 2, "n_head": 4}, ["c_attn", "c_proj", "c_fc"]),
    ("gpt_neox", {}, "all-linear"),
    ("granite", {}, "all-linear"),
    ("mamba", {"state_size": 8}, ["in_proj", "x_proj"]),
    ("mistral", {"head_dim": 16}, "all-linear"),
    ("olmo2", {}, "all-linear"),
    ("opt", {"ffn_dim": 96, "word_embed_proj_dim": 64}, "all-linear"),
    ("phi3", {}, "all-linear"),
    ("starcoder2", {}, "all-linear"),
]


def randomize(model, spread, wanted):
    for name, parameter in model.named_parameters():
        if wanted(name, parameter):
            parameter.data = torch.randn(parameter.shape) * spread


@torch.no_grad()
def run_architecture(kind, fields, targets, folder):
    torch.manual_seed(7)
    config = transformers.AutoConfig.for_model(kind, **{**SMALL, **fields})
    base = transformers.AutoModelForCausalLM.from_config(config).float()
    randomize(base, 0.12, lambda name, parameter: parameter.dim() > 1)
    base.save_pretrained(folder / "base")
    tokens, expected = torch.randint(3, 128, (3, 11)), []
    for rank in (0, 4, 8):  # the base, then two adapters
        model = load_model(folder / "base")
        if rank:
            model = peft.get_peft_model(model, peft.LoraConfig(
                r=rank, lora_alpha=8, target_modules=targets, task_type="CAUSAL_LM"))
            randomize(model, 0.1, lambda name, parameter: "lora_" in name)
            model.save_pretrained(folder / str(rank))
        expected.append(model(tokens, use_cache=False).logits[len(expected)])
    model = load_model(folder / "base")
    base_logits = model(tokens, use_cache=False).logits
    host = attach(model, {str(rank): folder / str(rank) for rank in (4, 8)})
    with host.batch([None, "4", "8"]):
        logits = model(tokens, use_cache=False).logits
    sites = len(host.places.hooked)
    host.close()
    return {"architecture": type(model).__name__, "sites": sites,
            "max_abs_error": float((logits - torch.stack(expected)).abs().max()),
            "max_abs_change": float((logits - base_logits).abs().max())}


def run_architectures():
    for kind, fields, targets in ARCHITECTURES:
        with tempfile.TemporaryDirectory() as folder:
            result = run_architecture(kind, fields, targets, Path(folder))
        print(result, flush=True)
        yield result


# ---- all ----------------------------------------------------------------------------------------


def versions():
    modules = {"torch": torch, "transformers": transformers, "peft": peft, "cffi": cffi}
    return {"python": platform.python_version(), "sidepath": sidepath.__version__,
            **{name: module.__version__ for name, module in modules.items()}}


def main():
    fixtures, out, only = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    index, begin = json.loads((fixtures / "index.json").read_text()), time.time()
    results = []
    for name, model in sorted(index["models"].items()):
        if not only or name in only:
            results.append(run_model(fixtures / name, model["adapters"]))
            print({key: results[-1][key] for key in ("model", "mixed", "greedy")}, flush=True)
    others = [] if only else list(run_architectures())
    failed = [record for result in results for record in failures(result)]
    failed += [other for other in others if other["max_abs_error"] > 1e-4]
    loads = [r for result in results for r in result["adapters"] if r["expect"] == "load"]
    out.write_text(json.dumps({
        "bench": "embed_transformers", "date": time.strftime("%Y-%m-%d"),
        "command": "bench/embed_transformers.py FIXTURES OUT.json",
        "versions": versions(), "seconds": round(time.time() - begin),
        "counts": {"load": len(loads),
                   "load_served": sum(r["verdict"] == "served" for r in loads),
                   "load_refused_for_experts": sum(r["verdict"] == "refused" for r in loads),
                   "failed": len(failed)},
        "models": results, "architectures": others}, indent=1) + "\n")
    for record in failed:
        print("FAILED", record)
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
