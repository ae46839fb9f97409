"""Runs make_checkpoint and reads what it wrote with nothing but the standard library.

    check_make_checkpoint.py MAKE_CHECKPOINT SCRATCH_DIR TOKENIZER_JSON
"""

import json
import math
import os
import shutil
import struct
import subprocess
import sys

BYTES = {"F32": 4, "BF16": 2, "F16": 2}


def run(*arguments, expect=0):
    done = subprocess.run([sys.argv[1], *arguments], capture_output=True, text=True)
    assert done.returncode == expect, (arguments, done.returncode, done.stderr)
    return done


def floats(dtype, data):
    if dtype == "F32":
        return struct.unpack(f"<{len(data) // 4}f", data)
    if dtype == "F16":
        return struct.unpack(f"<{len(data) // 2}e", data)
    halves = struct.unpack(f"<{len(data) // 2}H", data)
    words = struct.pack(f"<{len(halves)}I", *(half << 16 for half in halves))
    return struct.unpack(f"<{len(halves)}f", words)


def read(path):
    """Name -> (dtype, shape, values); checks that the tensors tile the data area."""
    with open(path, "rb") as file:
        data = file.read()
    length = struct.unpack_from("<Q", data)[0]
    assert length % 8 == 0
    header = json.loads(data[8:8 + length])
    assert header.pop("__metadata__") == {"format": "pt"}
    body, end, tensors = data[8 + length:], 0, {}
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"][0]):
        begin, stop = entry["data_offsets"]
        bytes_wanted = math.prod(entry["shape"]) * BYTES[entry["dtype"]]
        assert begin == end and stop - begin == bytes_wanted, name
        tensors[name] = (entry["dtype"], entry["shape"], floats(entry["dtype"], body[begin:stop]))
        end = stop
    assert end == len(body)
    return tensors


def check_moments(name, values, mean, deviation):
    """Uniform: nothing beyond sqrt(3) deviations; mean and deviation within five of their own."""
    n = len(values)
    found = sum(values) / n
    spread = math.sqrt(sum((v - found) ** 2 for v in values) / n)
    assert max(abs(v - mean) for v in values) <= deviation * 1.75, name
    assert abs(found - mean) <= 5 * deviation / math.sqrt(n), (name, found)
    assert abs(spread - deviation) <= 5 * deviation / math.sqrt(n), (name, spread)
    assert len(set(values)) > min(n, 4000) // 4, name


def check_model(scratch):
    where = os.path.join(scratch, "model")
    run(where, "--hidden", "96", "--layers", "3", "--heads", "6", "--kv-heads", "2",
        "--head-dim", "16", "--intermediate", "200", "--vocab", "301", "--untied",
        "--shards", "3", "--eos", "7", "--tokenizer", sys.argv[3])
    with open(os.path.join(where, "config.json"), encoding="ascii") as file:
        config = json.load(file)
    assert (config["hidden_size"], config["num_hidden_layers"]) == (96, 3)
    assert config["vocab_size"] == 301
    assert config["tie_word_embeddings"] is False and config["eos_token_id"] == 7
    with open(os.path.join(where, "tokenizer.json"), "rb") as copy:
        with open(sys.argv[3], "rb") as original:
            assert copy.read() == original.read()
    with open(os.path.join(where, "model.safetensors.index.json"), encoding="ascii") as file:
        index = json.load(file)
    tensors = {}
    for shard in range(1, 4):
        name = f"model-{shard:05}-of-00003.safetensors"
        part = read(os.path.join(where, name))
        assert part.keys() == {t for t, file in index["weight_map"].items() if file == name}
        tensors.update(part)
    assert len(tensors) == len(index["weight_map"]) == 3 + 3 * 11
    assert index["metadata"]["total_size"] == sum(2 * len(t[2]) for t in tensors.values())
    layer = "model.layers.2."
    want = {
        "model.embed_tokens.weight": ([301, 96], 0, 2 / math.sqrt(96)),
        "lm_head.weight": ([301, 96], 0, 2 / math.sqrt(96)),
        "model.norm.weight": ([96], 1, 0.1),
        layer + "input_layernorm.weight": ([96], 1, 0.1),
        layer + "post_attention_layernorm.weight": ([96], 1, 0.1),
        layer + "self_attn.q_norm.weight": ([16], 1, 0.1),
        layer + "self_attn.k_norm.weight": ([16], 1, 0.1),
        layer + "self_attn.q_proj.weight": ([96, 96], 0, 1 / math.sqrt(96)),
        layer + "self_attn.k_proj.weight": ([32, 96], 0, 1 / math.sqrt(96)),
        layer + "self_attn.v_proj.weight": ([32, 96], 0, 1 / math.sqrt(96)),
        layer + "self_attn.o_proj.weight": ([96, 96], 0, 1 / math.sqrt(96 * 6)),
        layer + "mlp.gate_proj.weight": ([200, 96], 0, 1 / math.sqrt(96)),
        layer + "mlp.up_proj.weight": ([200, 96], 0, 1 / math.sqrt(96)),
        layer + "mlp.down_proj.weight": ([96, 200], 0, 1 / math.sqrt(200 * 6)),
    }
    for name, (shape, mean, deviation) in want.items():
        assert tensors[name][:2] == ("BF16", shape), name
        check_moments(name, tensors[name][2], mean, deviation)
    assert tensors["lm_head.weight"][2] != tensors["model.embed_tokens.weight"][2]


def check_adapters(scratch):
    for dtype in ("f32", "bf16", "f16"):
        where = os.path.join(scratch, dtype)
        run(where, "--adapters", "2", "--rank", "5", "--dtype", dtype)
        assert len(read(os.path.join(where, "model.safetensors"))) == 2 + 2 * 11
        folders = [os.path.join(where, "adapters", name) for name in ("a0", "a1")]
        loaded = [read(os.path.join(folder, "adapter_model.safetensors")) for folder in folders]
        with open(os.path.join(folders[1], "adapter_config.json"), encoding="ascii") as file:
            config = json.load(file)
        assert (config["r"], config["lora_alpha"], len(config["target_modules"])) == (5, 10, 7)
        assert len(loaded[0]) == 2 * 7 * 2 and loaded[0].keys() == loaded[1].keys()
        stem = "base_model.model.model.layers.1.mlp.down_proj."
        found, shape, values = loaded[0][stem + "lora_A.weight"]
        assert (found, shape) == (dtype.upper(), [5, 160])
        check_moments(stem, values, 0, 1 / math.sqrt(160))
        assert loaded[0][stem + "lora_B.weight"][1] == [64, 5]
        assert values != loaded[1][stem + "lora_A.weight"][2]


def check_experts(scratch):
    """One by one, with a router; adapters of all of them."""
    where = os.path.join(scratch, "moe")
    run(where, "--preset", "tiny-moe", "--experts", "5", "--experts-per-token", "3",
        "--expert-intermediate", "40", "--adapters", "1", "--rank", "4")
    with open(os.path.join(where, "config.json"), encoding="ascii") as file:
        config = json.load(file)
    assert config["architectures"] == ["Qwen3MoeForCausalLM"]
    assert (config["num_experts"], config["num_experts_per_tok"]) == (5, 3)
    assert config["moe_intermediate_size"] == 40
    tensors = read(os.path.join(where, "model.safetensors"))
    assert len(tensors) == 3 + 2 * (8 + 1 + 3 * 5)
    mlp = "model.layers.1.mlp."
    want = {mlp + "gate.weight": ([5, 64], 1 / 8),
            mlp + "experts.4.up_proj.weight": ([40, 64], 1 / 8),
            mlp + "experts.4.down_proj.weight": ([64, 40], 1 / math.sqrt(4 * 40))}
    for name, (shape, deviation) in want.items():
        assert tensors[name][:2] == ("BF16", shape), name
        check_moments(name, tensors[name][2], 0, deviation)
    adapter = read(os.path.join(where, "adapters", "a0", "adapter_model.safetensors"))
    assert len(adapter) == 2 * 2 * (4 + 1 + 3 * 5)
    assert adapter["base_model.model." + mlp + "experts.3.down_proj.lora_A.weight"][1] == [4, 40]
    assert adapter["base_model.model." + mlp + "gate.lora_B.weight"][1] == [5, 4]


def check_hybrid(scratch):
    """Three gated delta nets and one attention, with the small tensors of real files."""
    where = os.path.join(scratch, "hybrid")
    run(where, "--preset", "tiny-hybrid", "--adapters", "1", "--rank", "3")
    with open(os.path.join(where, "config.json"), encoding="ascii") as file:
        config = json.load(file)
    assert config["architectures"] == ["Qwen3_5ForCausalLM"]
    assert (config["full_attention_interval"], config["linear_num_value_heads"]) == (4, 6)
    tensors = read(os.path.join(where, "model.safetensors"))
    assert len(tensors) == 3 + 3 * (2 + 4 + 5 + 3) + (2 + 2 + 4 + 3)
    delta, attention = "model.layers.2.linear_attn.", "model.layers.3.self_attn."
    want = {delta + "in_proj_qkv.weight": ("BF16", [160, 64]),
            delta + "in_proj_z.weight": ("BF16", [96, 64]),
            delta + "in_proj_a.weight": ("BF16", [6, 64]),
            delta + "out_proj.weight": ("BF16", [64, 96]),
            delta + "conv1d.weight": ("BF16", [160, 1, 4]),
            delta + "A_log": ("F32", [6]),
            delta + "dt_bias": ("BF16", [6]),
            delta + "norm.weight": ("F32", [16]),
            attention + "q_proj.weight": ("BF16", [256, 64])}
    for name, what in want.items():
        assert tensors[name][:2] == what, (name, tensors[name][:2])
    check_moments("norm", tensors["model.norm.weight"][2], 0, 0.1)
    adapter = read(os.path.join(where, "adapters", "a0", "adapter_model.safetensors"))
    assert len(adapter) == 2 * (3 * 8 + 7)
    assert adapter["base_model.model." + delta + "in_proj_b.lora_B.weight"][1] == [6, 3]


def check_repeats(scratch):
    """The same arguments, the same bytes; another seed, other bytes."""
    def model(name, *arguments):
        where = os.path.join(scratch, name)
        run(where, *arguments)
        with open(os.path.join(where, "model.safetensors"), "rb") as file:
            return file.read()

    first = model("r0", "--seed", "4")
    assert first == model("r1", "--seed", "4")
    other = model("r2", "--seed", "5")
    assert len(first) == len(other) and first != other


def check_adapters_only(scratch):
    """The same adapters and config, and no weights."""
    whole, only = os.path.join(scratch, "whole"), os.path.join(scratch, "only")
    run(whole, "--adapters", "1")
    run(only, "--adapters", "1", "--adapters-only")
    assert sorted(os.listdir(whole)) == sorted(os.listdir(only) + ["model.safetensors"])
    for name in ("config.json", "adapters/a0/adapter_model.safetensors"):
        with open(os.path.join(whole, name), "rb") as a, open(os.path.join(only, name), "rb") as b:
            assert a.read() == b.read(), name


def check_refusals(scratch):
    where = os.path.join(scratch, "twice")
    run(where)
    assert "config.json" in run(where, expect=1).stderr
    run(expect=2)
    run(os.path.join(scratch, "x"), "--tied", "--untied", expect=2)
    run(os.path.join(scratch, "x"), "--heads", "3", "--kv-heads", "2", expect=2)
    run(os.path.join(scratch, "x"), "--shards", "500", expect=2)
    run(os.path.join(scratch, "x"), "--experts", "4", expect=2)
    run(os.path.join(scratch, "x"), "--preset", "tiny-moe", "--experts", "1", expect=2)
    run(os.path.join(scratch, "missing", "deep"), expect=1)
    assert not os.path.exists(os.path.join(scratch, "x"))
    assert "usage: make_checkpoint" in run("--help").stdout


def main():
    scratch = sys.argv[2]
    shutil.rmtree(scratch, ignore_errors=True)
    os.makedirs(scratch)
    for check in (check_model, check_adapters, check_experts, check_hybrid, check_repeats,
                  check_adapters_only, check_refusals):
        check(scratch)
    shutil.rmtree(scratch)


if __name__ == "__main__":
    main()
