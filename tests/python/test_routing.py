"""Which experts each token was routed to: against Qwen3-MoE computed by numpy in double precision,
which itself is held against the logits of the fixtures; and the same by every way to it."""

import json
import os
import struct
import sys
import unittest
from pathlib import Path

import numpy
import sidepath
from fixtures import FIXTURES, ROOT

sys.path.insert(0, str(ROOT / "tests/server"))
import check_experts  # noqa: E402

MODEL = FIXTURES / "qwen3moe"
ADAPTERS = "attn-r4", "router", "v4-router", "all-linear"
BINARY = Path(os.environ["SIDEPATH_BINARY"])
GAP = 2e-3  # logits of routers that are nearer than this may swap in single precision


def read(path):
    """A safetensors file in double precision."""
    data = path.read_bytes()
    size, = struct.unpack_from("<Q", data)
    found = {}
    for name, entry in json.loads(data[8:8 + size]).items():
        if name == "__metadata__":
            continue
        begin, end = (8 + size + offset for offset in entry["data_offsets"])
        raw = data[begin:end]
        if entry["dtype"] == "BF16":
            values = (numpy.frombuffer(raw, "<u2").astype("<u4") << 16).view("<f4")
        else:
            values = numpy.frombuffer(raw, {"F32": "<f4", "F16": "<f2", "I64": "<i8",
                                            "I32": "<i4", "F64": "<f8"}[entry["dtype"]])
        found[name] = values.astype("f8").reshape(entry["shape"])
    return found


def weights_of(adapter=None):
    """The base's tensors; with an adapter of attention and routers, or of `all-linear`'s modules
    but for its experts, its deltas added."""
    weights = {}
    for shard in sorted(MODEL.glob("model-*.safetensors")):
        weights.update(read(shard))
    if adapter is None:
        return weights
    folder = MODEL / "adapters" / adapter
    config = json.loads((folder / "adapter_config.json").read_text())
    tensors = read(folder / "adapter_model.safetensors")
    for name, a in tensors.items():
        if not name.endswith(".lora_A.weight"):
            continue
        site, b = name[:-len(".lora_A.weight")], tensors[name.replace("lora_A", "lora_B")]
        assert not config["rank_pattern"] and not config["alpha_pattern"], adapter
        rank = config["r"]
        scale = config["lora_alpha"] / (rank ** 0.5 if config["use_rslora"] else rank)
        assert a.shape[0] == rank, name
        weights[site.removeprefix("base_model.model.") + ".weight"] += scale * b @ a
    return weights


def norm(x, weight):
    return x / numpy.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * weight


def rotated(x, theta=10000.0):
    """[tokens, heads, width], its halves rotated by the position."""
    half = x.shape[-1] // 2
    angles = numpy.arange(len(x))[:, None] * theta ** (-numpy.arange(half) / half)
    cos, sin = numpy.cos(angles)[:, None], numpy.sin(angles)[:, None]
    return numpy.concatenate([x[..., :half] * cos - x[..., half:] * sin,
                              x[..., half:] * cos + x[..., :half] * sin], -1)


def attention(w, layer, x):
    def heads(name):
        return (x @ w[layer + "self_attn.%s_proj.weight" % name].T).reshape(len(x), -1, 32)

    q = rotated(norm(heads("q"), w[layer + "self_attn.q_norm.weight"]))
    k = rotated(norm(heads("k"), w[layer + "self_attn.k_norm.weight"]))
    v, group = heads("v"), q.shape[1] // k.shape[1]
    out = numpy.empty_like(q)
    for head in range(q.shape[1]):
        scores = q[:, head] @ k[:, head // group].T / 32 ** 0.5
        scores[numpy.triu_indices(len(x), 1)] = -numpy.inf
        p = numpy.exp(scores - scores.max(-1, keepdims=True))
        out[:, head] = p / p.sum(-1, keepdims=True) @ v[:, head // group]
    return out.reshape(len(x), -1) @ w[layer + "self_attn.o_proj.weight"].T


def experts(w, layer, x, logits):
    """The output for each token, and the two experts of each, the larger logit first."""
    chosen = numpy.argsort(-logits, axis=-1, kind="stable")[:, :2]
    y = numpy.zeros_like(x)
    for token, row in enumerate(chosen):
        p = numpy.exp(logits[token, row] - logits[token, row[0]])
        for expert, share in zip(row, p / p.sum()):
            gate, up, down = (w["%smlp.experts.%d.%s_proj.weight" % (layer, expert, part)]
                              for part in ("gate", "up", "down"))
            g = gate @ x[token]
            y[token] += share * (down @ (g / (1 + numpy.exp(-g)) * (up @ x[token])))
    return y, chosen


def forward(w, tokens):
    """Logits [tokens, vocabulary], the experts [tokens, 3, 2], and the smallest distance of the
    first three logits of a router for each of these [tokens, 3]; behind a place where that is
    small all is in doubt."""
    x, routing, gaps = w["model.embed_tokens.weight"][list(tokens)], [], []
    for number in range(3):
        layer = "model.layers.%d." % number
        x = x + attention(w, layer, norm(x, w[layer + "input_layernorm.weight"]))
        inner = norm(x, w[layer + "post_attention_layernorm.weight"])
        logits = inner @ w[layer + "mlp.gate.weight"].T
        y, chosen = experts(w, layer, inner, logits)
        x = x + y
        routing.append(chosen)
        gaps.append(-numpy.diff(-numpy.sort(-logits, axis=-1)[:, :3], axis=-1).max(-1))
    logits = norm(x, w["model.norm.weight"]) @ w["lm_head.weight"].T
    return logits, numpy.stack(routing, 1), numpy.stack(gaps, 1)


def open_engine(**options):
    options = {"device": "cpu", "threads": 2, "precision": "f32", "max_context": 128,
               "max_running": 8, **options}
    return sidepath.Engine(MODEL, {name: MODEL / "adapters" / name for name in ADAPTERS},
                           **options)


class Routing(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.prompts = json.loads((MODEL / "prompts.json").read_text())["prompts"]
        cls.engine = open_engine()

    @classmethod
    def tearDownClass(cls):
        cls.engine.close()

    def same(self, one, other):
        self.assertEqual((one.format, one.shape, one.tobytes()),
                         (other.format, other.shape, other.tobytes()))

    def test_against_double_precision(self):
        sure = 0
        for adapter in None, "attn-r4", "router", "v4-router":
            weights = weights_of(adapter)
            golden = read(MODEL / "golden" / ((adapter or "base") + ".safetensors"))
            done = self.engine.generate(self.prompts, adapter, max_tokens=8, ignore_eos=True,
                                        routed_experts=True)
            for number, completion in enumerate(done):
                tokens = completion.prompt_tokens + completion.tokens
                logits, routing, gaps = forward(weights, tokens[:-1])
                want = golden["logits_p%d" % number if number < 2 else "logits_p2_last4"]
                last = len(completion.prompt_tokens)
                self.assertLess(abs(logits[last - len(want):last] - want).max(), 1e-4, adapter)
                got = numpy.asarray(completion.routed_experts)
                self.assertEqual((got.dtype, got.shape), (numpy.uint16, (len(tokens) - 1, 3, 2)))
                near = numpy.argwhere(gaps < GAP)
                end = near[0][0] if len(near) else len(tokens) - 1
                numpy.testing.assert_array_equal(got[:end], routing[:end], adapter)
                sure += end
        self.assertGreater(sure, 120)

    def test_same_bits_with_it_and_without(self):
        names = [None, *ADAPTERS]
        settings = {"max_tokens": 12, "temperature": 0.9, "logprobs": True, "ignore_eos": True}
        prompts = [self.prompts[2][:20 + i] for i in range(len(names))]
        plain = self.engine.generate(prompts, names, **settings)
        routed = self.engine.generate(prompts, names, routed_experts=True, **settings)
        for one, other in zip(plain, routed):
            self.assertEqual((one.tokens, one.logprobs), (other.tokens, other.logprobs))
            self.assertIsNone(one.routed_experts)

    def test_scoring_generating_chunks_and_the_prefix_cache(self):
        """A prompt that is in the cache, in pieces, alone, in a batch, and as what is scored."""
        names = [None, *ADAPTERS]
        prompts = [self.prompts[2]] * len(names)
        done = self.engine.generate(prompts, names, max_tokens=9, ignore_eos=True,
                                    routed_experts=True)
        ids = [c.prompt_tokens + c.tokens for c in done]
        self.assertGreater(len({c.routed_experts.tobytes() for c in done}), 3)
        for engine in self.engine, open_engine(step_rows=7, max_running=2, threads=1):
            for _ in range(2):
                scores = engine.score(ids, names, prompt_lengths=30, routed_experts=True)
                plain = engine.score(ids, names, prompt_lengths=30)
                self.assertEqual(scores, plain)
                for score, completion in zip(scores, done):
                    routing = score.routed_experts
                    self.assertEqual(routing.shape, (len(ids[0]), 3, 2))
                    self.assertEqual(routing.tobytes()[:-12], completion.routed_experts.tobytes())
                    self.assertGreater(len(set(routing.tobytes()[-12:])), 1)
                self.assertIsNone(plain[0].routed_experts)
        alone = engine.generate(prompts[:1], names[-1], max_tokens=9, ignore_eos=True,
                                routed_experts=True)[0]
        self.same(alone.routed_experts, done[-1].routed_experts)
        engine.close()

    def test_over_http(self):
        """Completions, chat, streams and scores of a server, in both encodings."""
        with check_experts.moe_serving(BINARY, "--max-loras", 4,
                                       "--expert-bytes", 1 << 20) as server:
            client = sidepath.Client(server.url)
            for name in ADAPTERS[1:3]:
                self.assertEqual(check_experts.load(server, name).status, 200)
                done = self.engine.generate([self.prompts[2]], name, max_tokens=6,
                                            ignore_eos=True, routed_experts=True)[0]
                want = done.routed_experts.tolist()
                fields = {"max_tokens": 6, "temperature": 0, "ignore_eos": True, "n": 2,
                          "routed_experts": True}
                answer = client.generate(self.prompts[2], name, **fields)
                self.assertEqual([c["routed_experts"] for c in answer["choices"]], [want] * 2)
                events = server_events(server, "/v1/completions", {
                    "prompt": self.prompts[2], "model": name, **fields, "stream": True})
                self.assertEqual(routed_of(events), {0: want, 1: want})
                ids = done.prompt_tokens + done.tokens
                score = client.score([ids, ids[:3]], name, routed_experts=True)
                self.assertEqual(score[0].routed_experts.tolist()[:-1], want)
                self.assertEqual(score[1].routed_experts.tolist(), want[:3])
                listed = check_experts.post(server, "/v1/score", {
                    "model": name, "sequences": [ids], "routed_experts": True}).json["data"][0]
                self.assertEqual(listed["routed_experts"], score[0].routed_experts.tolist())
                self.check_chat(server, name)
            self.assertIsNone(client.score([ids])[0].routed_experts)

    def check_chat(self, server, name):
        body = {"model": name, "messages": [{"role": "user", "content": "who?"}], "max_tokens": 5,
                "temperature": 0, "ignore_eos": True, "routed_experts": True,
                "return_token_ids": True}
        answer = check_experts.post(server, "/v1/chat/completions", body).json
        choice = answer["choices"][0]
        want = self.engine.generate([answer["prompt_token_ids"]], name, max_tokens=5,
                                    ignore_eos=True, routed_experts=True)[0]
        self.assertEqual((choice["token_ids"], choice["routed_experts"]),
                         (want.tokens, want.routed_experts.tolist()))
        events = server_events(server, "/v1/chat/completions", {**body, "stream": True})
        self.assertEqual(routed_of(events), {0: choice["routed_experts"]})
        for path, more in (("/v1/messages", {}), ("/v1/responses", {"input": "a"})):
            refused = {**body, **more}
            if more:
                del refused["messages"], refused["max_tokens"]
            refusal = check_experts.post(server, path, refused)
            self.assertEqual(refusal.status, 400, refusal.bytes)

    def test_a_base_without_experts(self):
        with sidepath.Engine(FIXTURES / "qwen3-tied", device="cpu", threads=1) as engine:
            with self.assertRaises(sidepath.Refused) as caught:
                engine.generate([[1, 2]], routed_experts=True)
            self.assertEqual(caught.exception.subject, "routed_experts")


def server_events(server, path, body):
    answer = check_experts.post(server, path, body)
    assert answer.status == 200, answer.bytes
    lines = [line[6:] for line in answer.bytes.decode().splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]", lines[-1]
    return [json.loads(line) for line in lines[:-1]]


def routed_of(events):
    """By choice; it is in one event of each, the last."""
    found = {}
    for event in events:
        for choice in event["choices"]:
            assert ("routed_experts" in choice) == (choice["finish_reason"] is not None), choice
            if "routed_experts" in choice:
                assert choice["index"] not in found
                found[choice["index"]] = choice["routed_experts"]
    return found
