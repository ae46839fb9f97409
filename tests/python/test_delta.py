"""Pool, plan and delta on numpy arrays: sums against double precision, rows against themselves in
other batches by their bytes, refusals, and who keeps what alive."""

import gc
import os
import subprocess
import sys
import threading
import unittest

import numpy
import sidepath
from fixtures import FIXTURES

SHAPES = {"a.q": (48, 40), "a.k": (48, 24), "b.up": (40, 64)}
RANKS = 3, 8, 5


def make_geometry():
    return sidepath.Geometry([
        sidepath.Site("layers.0.%s" % name, k_in, n_out, layer=0, group=0 if name[0] == "a" else -1)
        for name, (k_in, n_out) in SHAPES.items()])


def make_adapter(geometry, rank, seed, skip=()):
    """An adapter with alpha 2 * rank, and its factors by site."""
    random = numpy.random.default_rng(seed)
    factors, tensors = {}, {}
    for name, (k_in, n_out) in SHAPES.items():
        if name in skip:
            continue
        a = random.standard_normal((rank, k_in)).astype("<f4") * numpy.float32(0.3)
        b = random.standard_normal((n_out, rank)).astype("<f4") * numpy.float32(0.3)
        factors[name] = a, b
        tensors["base_model.model.layers.0.%s.lora_A.weight" % name] = a
        tensors["base_model.model.layers.0.%s.lora_B.weight" % name] = b
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank,
              "target_modules": [name.partition(".")[2] for name in factors]}
    return sidepath.Adapter.from_tensors(tensors, config, geometry, name="r%d" % rank), factors


def bf16(array):
    """float32 to the bits of bfloat16, nearest even."""
    bits = numpy.ascontiguousarray(array, "<f4").view("<u4")
    return ((bits + 0x7fff + (bits >> 16 & 1)) >> 16).astype("<u2")


def widened(bits):
    return (bits.astype("<u4") << 16).view("<f4")


class World:
    """Three adapters in a pool of four slots, and a batch that mixes them with the base."""

    def __init__(self, dtype="f32", device=None, **keywords):
        self.geometry = make_geometry()
        self.layout = sidepath.Layout(self.geometry, rank=8, dtype=dtype)
        self.pool = sidepath.Pool(self.layout, 4, device)
        made = [make_adapter(self.geometry, rank, seed, ("a.k",) if rank == 5 else ())
                for seed, rank in enumerate(RANKS)]
        self.factors = [factors for _, factors in made]
        self.versions = [self.pool.load(adapter) for adapter, _ in made]
        self.delta = sidepath.Delta(self.pool, 64, **keywords)
        self.spans = [(0, 5, 1.0), (None, 3, 1.0), (2, 7, 0.5),
                      (1, 1, 1.0), (0, 2, 0.0), (1, 9, 2.0)]
        self.rows = [(which, scale) for which, n, scale in self.spans for _ in range(n)]
        self.plan = sidepath.Plan(64, 4).build(self.pool, [
            (None if which is None else self.versions[which], n, scale)
            for which, n, scale in self.spans])

    def batch(self, name, seed=9):
        random = numpy.random.default_rng(seed)
        k_in, n_out = SHAPES[name]
        return (random.standard_normal((len(self.rows), k_in)).astype("<f4"),
                random.standard_normal((len(self.rows), n_out)).astype("<f4"))

    def truth(self, name, x, y):
        """In double precision."""
        out = y.astype("<f8")
        for row, (which, scale) in enumerate(self.rows):
            if which is not None and scale and name in self.factors[which]:
                a, b = (factor.astype("<f8") for factor in self.factors[which][name])
                out[row] += 2.0 * scale * (b @ (a @ x[row].astype("<f8")))
        return out

    def bf16_bound(self, name, x, truth):
        """The largest error in bfloat16: a, b, xa and delta are each rounded once, by 2^-9 of what
        they are, which is at most the sum of absolute products; y by 2^-9 of the result."""
        bound = numpy.abs(truth) * 2.0**-9
        for row, (which, scale) in enumerate(self.rows):
            if which is not None and name in self.factors[which]:
                a, b = (numpy.abs(factor.astype("<f8")) for factor in self.factors[which][name])
                bound[row] += 2.0 * scale * (b @ (a @ numpy.abs(x[row].astype("<f8")))) * 2.0**-7
        return bound * 1.01


class Sums(unittest.TestCase):
    def test_float32(self):
        world = World()
        for name in SHAPES:
            x, y = world.batch(name)
            expected = world.truth(name, x, y)
            world.delta.apply(world.plan, x, {"layers.0." + name: y})
            numpy.testing.assert_allclose(y, expected, rtol=0, atol=2e-5)

    def test_bfloat16(self):
        world = World("bf16")
        x, y = world.batch("a.q")
        x_bits, y_bits = bf16(x), bf16(y)
        expected = world.truth("a.q", widened(x_bits), widened(y_bits))
        world.delta.apply(world.plan, sidepath.bfloat16(x_bits), {0: sidepath.bfloat16(y_bits)})
        bound = world.bf16_bound("a.q", widened(x_bits), expected)
        self.assertTrue((numpy.abs(widened(y_bits) - expected) <= bound).all())
        float_y = y.copy()
        world.delta.apply(world.plan, sidepath.bfloat16(x_bits), {0: float_y})
        expected = world.truth("a.q", widened(x_bits), y)
        self.assertTrue((numpy.abs(float_y - expected) <= bound).all())

    def test_a_group_in_one_call(self):
        world = World()
        x, q = world.batch("a.q")
        _, k = world.batch("a.k", 10)
        alone_q, alone_k = q.copy(), k.copy()
        world.delta.apply(world.plan, x, {0: alone_q})
        world.delta.apply(world.plan, x, {1: alone_k})
        world.delta.apply(world.plan, x, {"layers.0.a.q": q, "layers.0.a.k": k})
        self.assertEqual((q.tobytes(), k.tobytes()), (alone_q.tobytes(), alone_k.tobytes()))

    def test_rows_are_their_own(self):
        """One row, one answer: alone, in another slot, with threads, through strides."""
        world, other = World(), World(threads=sidepath.Threads(2))
        x, y = world.batch("a.q")
        before, base = y.copy(), [which is None or scale == 0 for which, scale in world.rows]
        world.delta.apply(world.plan, x, {0: y})
        self.assertEqual(y[base].tobytes(), before[base].tobytes())
        self.assertTrue((y[~numpy.array(base)] != before[~numpy.array(base)]).any(axis=1).all())
        single = sidepath.Plan(1, 4)
        for row, (which, scale) in enumerate(world.rows):
            alone = before[row:row + 1].copy()
            version = None if which is None else world.versions[which]
            single.build(world.pool, [(version, 1, scale)])
            world.delta.apply(single, x[row:row + 1], {0: alone})
            self.assertEqual(alone.tobytes(), y[row:row + 1].tobytes(), row)
        wide_x, wide_y = numpy.full((len(x), 60), 3, "<f4"), numpy.full((len(x), 90), 4, "<f4")
        wide_x[:, 7:55], wide_y[:, 11:51] = x, before
        other.delta.apply(other.plan, wide_x[:, 7:55], {0: wide_y[:, 11:51]})
        self.assertEqual(wide_y[:, 11:51].tobytes(), y.tobytes())
        self.assertTrue((wide_y[:, :11] == 4).all() and (wide_y[:, 51:] == 4).all())

    def test_select(self):
        world = World()
        x, y = world.batch("b.up")
        rows = [20, 0, 6, 9, 9]
        picked = y[rows].copy()
        world.delta.apply(world.plan, x, {2: y})
        plan = sidepath.Plan(8, 4).select(world.plan, rows)
        world.delta.apply(plan, x[rows], {2: picked})
        self.assertEqual(picked.tobytes(), y[rows].tobytes())


class Experts(unittest.TestCase):
    """Rows of experts of a base of the fixtures: 8 experts, two of them for a token."""

    LAYER, HIDDEN, INNER, TOP_K = "model.layers.1.mlp.", 64, 48, 2
    ADAPTED = {0: range(8), 1: (1, 4, 6)}  # experts of each adapter
    RANKS = 4, 7

    @classmethod
    def setUpClass(cls):
        cls.geometry = sidepath.Geometry.open(FIXTURES / "qwen3moe")
        layout = sidepath.Layout(cls.geometry, rank=8, dtype="f32", expert_rank=8)
        cls.pool = sidepath.Pool(layout, 2, expert_bytes=1 << 20)
        made = [cls.make_adapter(which) for which in cls.ADAPTED]
        cls.factors = [factors for _, factors in made]
        cls.versions = [cls.pool.load(adapter) for adapter, _ in made]
        cls.spans = [(0, 9, 1.0), (None, 4, 1.0), (1, 8, 0.5), (0, 1, 0.0), (1, 3, 2.0)]
        cls.rows = [(which, scale) for which, n, scale in cls.spans for _ in range(n)]
        cls.plan = sidepath.Plan(64, 2).build(cls.pool, [
            (None if which is None else cls.versions[which], n, scale)
            for which, n, scale in cls.spans])
        random = numpy.random.default_rng(5)
        cls.chosen = numpy.stack([random.permutation(8)[:2] for _ in cls.rows]).astype("<i4")

    @classmethod
    def make_adapter(cls, which):
        random, rank = numpy.random.default_rng(which), cls.RANKS[which]
        factors, tensors = {}, {}
        for expert in cls.ADAPTED[which]:
            for module in "gate_proj", "up_proj", "down_proj":
                k_in, n_out = ((cls.HIDDEN, cls.INNER) if module != "down_proj" else
                               (cls.INNER, cls.HIDDEN))
                a = random.standard_normal((rank, k_in)).astype("<f4") * numpy.float32(0.3)
                b = random.standard_normal((n_out, rank)).astype("<f4") * numpy.float32(0.3)
                factors[expert, module] = a, b
                name = "base_model.model.%sexperts.%d.%s" % (cls.LAYER, expert, module)
                tensors[name + ".lora_A.weight"], tensors[name + ".lora_B.weight"] = a, b
        config = {"peft_type": "LORA", "r": rank, "lora_alpha": 3 * rank,
                  "target_modules": ["gate_proj", "up_proj", "down_proj"]}
        return sidepath.Adapter.from_tensors(tensors, config, cls.geometry), factors

    def site(self, module, expert=0):
        return "%sexperts.%d.%s" % (self.LAYER, expert, module)

    def truth(self, module, x, y, by_row=False):
        """In double precision, with rows in the order of the pairs."""
        out = y.astype("<f8")
        for pair, expert in enumerate(self.chosen.ravel()):
            token = pair // self.TOP_K
            which, scale = self.rows[token]
            if which is not None and scale and (expert, module) in self.factors[which]:
                a, b = (factor.astype("<f8") for factor in self.factors[which][expert, module])
                out[pair] += 3.0 * scale * (b @ (a @ x[pair if by_row else token].astype("<f8")))
        return out

    def arrays(self, *shape):
        return numpy.random.default_rng(sum(shape)).standard_normal(shape).astype("<f4")

    def test_against_double_precision(self):
        tokens, pairs = self.chosen.shape[0], self.chosen.size
        x, inner = self.arrays(tokens, self.HIDDEN), self.arrays(pairs, self.INNER)
        gate, up = self.arrays(pairs, self.INNER), self.arrays(pairs, self.INNER) + 1
        down = self.arrays(pairs, self.HIDDEN)
        expected = [self.truth("gate_proj", x, gate), self.truth("up_proj", x, up),
                    self.truth("down_proj", inner, down, True)]
        before = gate.copy()
        for options in {}, {"threads": sidepath.Threads(2), "expert_rows_max": 7}:
            delta = sidepath.Delta(self.pool, 64, **options)
            got = [gate.copy(), up.copy(), down.copy()]
            delta.begin_experts(self.plan, self.chosen)
            delta.apply_experts(x, {self.site("gate_proj"): got[0],
                                    self.geometry.find(self.site("up_proj", 5)): got[1]})
            delta.apply_experts(inner, {self.site("down_proj", 7): got[2]}, by_row=True)
            for one, want in zip(got, expected):
                numpy.testing.assert_allclose(one, want, rtol=0, atol=5e-5)
        untouched = [self.rows[pair // 2][0] is None or not self.rows[pair // 2][1] or
                     expert not in self.ADAPTED[self.rows[pair // 2][0]]
                     for pair, expert in enumerate(self.chosen.ravel())]
        self.assertTrue(10 < sum(untouched) < 40)
        self.assertEqual(got[0][untouched].tobytes(), before[untouched].tobytes())

    def test_sorted_rows_have_the_same_bits(self):
        x, y = self.arrays(self.chosen.shape[0], self.HIDDEN), self.arrays(50, self.INNER)
        delta = sidepath.Delta(self.pool, 64)
        row_pair = numpy.argsort(self.chosen.ravel(), kind="stable").astype("<i4")
        begin = numpy.searchsorted(self.chosen.ravel()[row_pair], numpy.arange(9)).astype("<i4")
        gathered, by_expert = y.copy(), y[row_pair].copy()
        delta.begin_experts(self.plan, self.chosen)
        delta.apply_experts(x, {self.site("up_proj"): gathered})
        delta.begin_experts(self.plan, row_pair=row_pair, expert_begin=begin, top_k=2)
        delta.apply_experts(x, {self.site("up_proj"): by_expert})
        self.assertEqual(by_expert.tobytes(), gathered[row_pair].tobytes())
        self.assertNotEqual(gathered.tobytes(), y.tobytes())

    def test_the_router_is_a_site(self):
        tensors, config = {}, {"peft_type": "LORA", "r": 2, "lora_alpha": 2,
                               "target_parameters": ["mlp.gate.weight"]}
        a, b = self.arrays(2, self.HIDDEN), self.arrays(8, 2)
        name = "base_model.model.%sgate.lora_" % self.LAYER
        tensors[name + "A.weight"], tensors[name + "B.weight"] = a, b
        layout = sidepath.Layout(self.geometry, rank=8, dtype="f32", expert_rank=8)
        pool = sidepath.Pool(layout, 1, expert_bytes=1 << 20)
        version = pool.load(sidepath.Adapter.from_tensors(tensors, config, self.geometry))
        plan = sidepath.Plan(8, 1).build(pool, [(version, 5)])
        x, logits = self.arrays(5, self.HIDDEN), self.arrays(5, 8)
        expected = logits.astype("<f8") + x.astype("<f8") @ a.T.astype("<f8") @ b.T.astype("<f8")
        sidepath.Delta(pool, 8).apply(plan, x, {self.LAYER + "gate": logits})
        numpy.testing.assert_allclose(logits, expected, rtol=0, atol=2e-4)

    def test_wrong_calls_are_named(self):
        delta = sidepath.Delta(self.pool, 64)
        x, y = self.arrays(25, self.HIDDEN), self.arrays(50, self.INNER)
        gate = self.site("gate_proj")
        with self.assertRaises(sidepath.WrongCall) as caught:
            delta.apply_experts(x, {gate: y})
        self.assertEqual(caught.exception.code, "no-rows")
        order = numpy.arange(50, dtype="<i4")
        for keywords, words in (
                ({}, "either"), ({"experts": self.chosen, "row_pair": order}, "either"),
                ({"row_pair": order}, "either"), ({"experts": self.chosen[:-1]}, "[25, *]"),
                ({"experts": self.chosen.astype("<i8")}, "int"),
                ({"experts": numpy.asfortranarray(self.chosen)}, "dense"),
                ({"row_pair": order, "expert_begin": order[:8], "top_k": 2}, "[9]"),
                ({"row_pair": order, "expert_begin": order[9:0:-1].copy(), "top_k": 2},
                 "bad-expert-rows")):
            with self.assertRaises(sidepath.SidepathError) as caught:
                delta.begin_experts(self.plan, **keywords)
            self.assertIn(words, str(caught.exception), keywords)
            with self.assertRaises(sidepath.WrongCall):
                delta.apply_experts(x, {gate: y})
        delta.begin_experts(self.plan, self.chosen)
        before = y.copy()
        for call, words in (
                (lambda: delta.apply_experts(x[:5], {gate: y}), "5 rows"),
                (lambda: delta.apply_experts(y, {gate: y}, by_row=True), "48 columns"),
                (lambda: delta.apply_experts(x, {gate: y[:25]}), "25 rows"),
                (lambda: delta.apply_experts(x, {self.LAYER + "gate": self.arrays(50, 8)}),
                 "no expert"),
                (lambda: delta.apply_experts(x, {gate: y, "model.layers.0.mlp.experts.0.up_proj":
                                                 y.copy()}), "layer"),
                (lambda: delta.apply_experts(x, {}), "outputs")):
            with self.assertRaises(sidepath.SidepathError) as caught:
                call()
            self.assertIn(words, str(caught.exception))
        self.assertEqual(before.tobytes(), y.tobytes())


class Tables(unittest.TestCase):
    def test_embedding_and_head(self):
        """Pairs of both, and a replaced row: against double precision."""
        random = numpy.random.default_rng(4)
        vocabulary, hidden, rank = 32, 24, 4
        geometry = sidepath.Geometry([
            sidepath.Site("model.embed_tokens", vocabulary, hidden, "embedding"),
            sidepath.Site("lm_head", hidden, vocabulary, "head")])
        embed, head = (random.standard_normal((vocabulary, hidden)).astype("<f4") for _ in "eh")
        served = {"served_embed": embed, "served_head": head}
        parts = {"embed_tokens.lora_embedding_A": (rank, vocabulary),
                 "embed_tokens.lora_embedding_B": (hidden, rank),
                 "lm_head.lora_A.weight": (rank, hidden),
                 "lm_head.lora_B.weight": (vocabulary, rank)}
        tensors = {("base_model.model.model." if "embed" in name else "base_model.model.") + name:
                   random.standard_normal(shape).astype("<f4") for name, shape in parts.items()}
        ea, eb, ha, hb = (tensor.astype("<f8") for tensor in tensors.values())
        config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank,
                  "target_modules": ["embed_tokens", "lm_head"]}
        adapter = sidepath.Adapter.from_tensors(tensors, config, geometry, precision="f32",
                                                **served)
        layout = sidepath.Layout(geometry, rank=rank, dtype="f32",
                                 modules=["embed_tokens", "lm_head"], **served)
        pool = sidepath.Pool(layout, 2)
        plan = sidepath.Plan(6, 2).build(pool, [(pool.load(adapter), 4), (None, 2)])
        delta = sidepath.Delta(pool, 6)
        self.assertTrue(delta.has_tokens("embedding") and delta.has_tokens("head"))
        tokens = numpy.array([3, 31, 0, 3, 5, 6], "<i4")
        y = embed[tokens]
        expected = y.astype("<f8")
        expected[:4] += (eb @ ea[:, tokens[:4]]).T
        delta.embed(plan, tokens, y)
        numpy.testing.assert_allclose(y, expected, rtol=0, atol=1e-5)
        x = random.standard_normal((6, hidden)).astype("<f4")
        logits = x @ head.T
        expected = logits.astype("<f8")
        expected[:4] += x[:4].astype("<f8") @ ha.T @ hb.T
        delta.head(plan, x, logits)
        numpy.testing.assert_allclose(logits, expected, rtol=0, atol=1e-4)
        with self.assertRaisesRegex(sidepath.WrongCall, "tokens must be a dense int32"):
            delta.embed(plan, tokens.astype("<i8").astype("<f4"), y)


class Refusals(unittest.TestCase):
    def setUp(self):
        self.world = World()
        self.x, self.y = self.world.batch("a.q")

    def refused(self, code, *arguments, kind=sidepath.WrongCall):
        before = self.y.copy()
        with self.assertRaises(kind) as caught:
            self.world.delta.apply(*arguments)
        self.assertEqual(caught.exception.code, code, caught.exception)
        self.assertEqual(before.tobytes(), self.y.tobytes())

    def test_shapes(self):
        plan, x, y = self.world.plan, self.x, self.y
        self.refused("bad-shape", plan, x[:-1], {0: y})
        self.refused("bad-shape", plan, x, {0: y[:-1]})
        self.refused("bad-shape", plan, x[:, :-1], {0: y})
        self.refused("bad-shape", plan, x, {1: y})
        self.refused("bad-shape", plan, x, {0: y.T})
        self.refused("bad-shape", plan, x, {0: y[:, ::-1]})
        self.refused("bad-shape", plan, x, {0: y.reshape(-1)})
        self.refused("bad-shape", plan, x, {site: y for site in range(17)})
        self.refused("no-such-site", plan, x, {"layers.1.a.q": y})
        self.refused("no-such-site", plan, x, {-1: y})
        self.refused("bad-tensor", plan, x.astype("<f8"), {0: y})
        read_only = y.copy()
        read_only.flags.writeable = False
        self.refused("bad-tensor", plan, x, {0: read_only})
        self.refused("bad-dtype", plan, x.astype("<i4"), {0: y})
        # The library's own: float16 into a pool of float32; sites of one call that read two x.
        self.refused("", plan, x.astype("<f2"), {0: y})

    def test_another_device(self):
        on_gpu = sidepath.arrays.view(self.y)._replace(device=sidepath.arrays.CUDA)
        self.refused("wrong-device", self.world.plan, self.x, {0: on_gpu})

    def test_plans(self):
        world = self.world
        self.refused("plan-of-another-pool", World().plan, self.x, {0: self.y})
        world.versions[0].close()
        self.refused("handle-released", world.plan, self.x, {0: self.y})
        plan = sidepath.Plan(8, 4)
        with self.assertRaises(sidepath.WrongCall) as caught:
            plan.build(world.pool, [(None, 3), (world.versions[1], 6)])
        self.assertIn("8", caught.exception.text)
        with self.assertRaises(sidepath.Closed):
            plan.build(world.pool, [(world.versions[0], 1)])
        with self.assertRaises(sidepath.WrongCall):
            plan.build(world.pool, [(None, 1, 17.0)])
        self.assertEqual(plan.n_rows, 0)

    def test_full_and_stale(self):
        world = self.world
        more = [make_adapter(world.geometry, 2, seed)[0] for seed in (7, 8)]
        fourth = world.pool.load(more[0])
        with self.assertRaises(sidepath.NotYet) as caught:
            world.pool.load(more[1])
        self.assertEqual(caught.exception.status_name, "SP_POOL_FULL")
        slot = fourth.slot
        fourth.close()
        self.assertEqual(world.pool.load(more[1]).slot, slot)
        again = world.pool.load(make_adapter(world.geometry, RANKS[1], 1)[0])  # as it is there
        self.assertEqual(again.slot, world.versions[1].slot)
        with self.assertRaises(sidepath.Refused) as caught:
            world.pool.load(make_adapter(world.geometry, 9, 1)[0])
        self.assertEqual(caught.exception.code, "rank-exceeds-pool")


CYCLE = """
import gc, sys
sys.path.insert(0, %r)
import test_delta
world = test_delta.World(threads=test_delta.sidepath.Threads(2))
%s
print("whole")
"""


class Ownership(unittest.TestCase):
    def run_alone(self, body):
        """In a process of its own, which must end well."""
        path = os.path.dirname(os.path.abspath(__file__))
        done = subprocess.run([sys.executable, "-B", "-c", CYCLE % (path, body)], text=True,
                              capture_output=True, check=False,
                              env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
        self.assertEqual((done.returncode, done.stdout, done.stderr), (0, "whole\n", ""))

    def test_close_in_any_order(self):
        for order in (0, 1, -1):
            world = World()
            things = [world.geometry, world.layout, world.pool, world.delta, world.plan,
                      *world.versions]
            for thing in things[order:] + things[:order] if order >= 0 else reversed(things):
                thing.close()
                thing.close()
                self.assertTrue(thing.closed)

    def test_what_is_over_a_closed_object_still_works(self):
        world = World()
        x, y = world.batch("a.q")
        world.geometry.close()
        world.layout.close()
        other = y.copy()
        world.delta.apply(world.plan, x, {0: y})
        numpy.testing.assert_allclose(y, world.truth("a.q", x, other), rtol=0, atol=2e-5)
        world.pool.close()
        for use in (lambda: world.pool.load(make_adapter(make_geometry(), 2, 1)[0]),
                    lambda: world.plan.build(world.pool, [(None, 1)])):
            self.assertRaises(sidepath.Closed, use)

    def test_use_after_close(self):
        for name in "plan", "delta":
            world = World()
            x, y = world.batch("a.q")
            getattr(world, name).close()
            with self.assertRaisesRegex(sidepath.Closed, name.capitalize()):
                world.delta.apply(world.plan, x, {0: y})
        world.versions[0].close()
        self.assertRaisesRegex(sidepath.Closed, "Version", world.versions[0].share)

    def test_sharing(self):
        world = World()
        slot = world.versions[0].slot
        shared = world.versions[0].share()
        self.assertEqual(world.pool.references(slot), 2)
        world.versions[0].close()
        self.assertEqual(world.pool.references(slot), 1)
        del shared
        gc.collect()
        self.assertEqual(world.pool.references(slot), 0)

    def test_cycles(self):
        self.run_alone("for name in dir(world):\n"
                       "    thing = getattr(world, name)\n"
                       "    if isinstance(thing, test_delta.sidepath._library.Handle):\n"
                       "        thing.cycle = world\n"
                       "thing = world.versions[0]; thing.cycle = world; del world, thing, name\n"
                       "gc.collect()")

    def test_the_end_of_the_interpreter(self):
        self.run_alone("import builtins; builtins.kept = world")

    def test_exceptions_keep_things(self):
        self.run_alone("try:\n    world.delta.apply(world.plan, 1, {0: 1})\n"
                       "except Exception as error:\n    kept = error\ndel world\ngc.collect()")

    def test_fork(self):
        self.run_alone("""
import os, numpy
x, y = world.batch("a.q")
expected = y.copy()
world.delta.apply(world.plan, x, {0: expected})
child = os.fork()
if not child:
    world.delta.apply(world.plan, x, {0: y})
    same = y.tobytes() == expected.tobytes()
    del world
    gc.collect()
    os._exit(0 if same else 1)
assert os.waitpid(child, 0)[1] == 0
world.delta.apply(world.plan, x, {0: y})
assert y.tobytes() == expected.tobytes()""")

    def test_dropped_on_another_thread(self):
        """A version that another thread lets go of while a call is going on is given back."""
        world = World()
        turns, slot = world.pool._turns, world.versions[0].slot
        with turns:
            thread = threading.Thread(target=world.versions[0].close)
            thread.start()
            thread.join(10)
            self.assertEqual(len(turns._late), 1)
        self.assertEqual(world.pool.references(slot), 0)
        self.assertEqual(len(turns._late), 0)

    def test_no_copies(self):
        import copy
        import pickle

        world = World()
        for thing in world.pool, world.versions[0], world.plan:
            self.assertRaises(TypeError, copy.copy, thing)
            self.assertRaises(TypeError, pickle.dumps, thing)

    def test_memory_is_given_back(self):
        def round_of_everything():
            for _ in range(20):
                world = World()
                x, y = world.batch("a.q")
                world.delta.apply(world.plan, x, {0: y})
            gc.collect()

        def kilobytes():
            with open("/proc/self/statm", encoding="ascii") as file:
                return int(file.read().split()[1]) * 4

        round_of_everything()
        before = kilobytes()
        for _ in range(3):
            round_of_everything()
        self.assertLess(kilobytes() - before, 4096)


if __name__ == "__main__":
    unittest.main()
