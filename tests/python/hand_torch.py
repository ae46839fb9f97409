"""By hand: the package with torch, peft and transformers.
    check_package.py SIDEPATH LIBRARY CC hand_torch"""

import gc
import tempfile
import unittest
import warnings

import numpy
import peft
import sidepath
import sidepath.transformers
import torch
import transformers
from fixtures import DEMO, FIXTURES
from test_delta import World

NAMES = "csource", "scripture", "sqldoc"


def load(folder=DEMO / "base"):
    warnings.filterwarnings("ignore")
    transformers.utils.logging.disable_progress_bar()
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


class Tensors(unittest.TestCase):
    def test_torch_is_numpy(self):
        world = World()
        x, y = world.batch("a.q")
        tensor_x, tensor_y = torch.from_numpy(x.copy()), torch.from_numpy(y.copy())
        world.delta.apply(world.plan, x, {0: y})
        world.delta.apply(world.plan, tensor_x, {0: tensor_y})
        self.assertEqual(tensor_y.numpy().tobytes(), y.tobytes())

    def test_bfloat16(self):
        world = World("bf16")
        x, y = (torch.from_numpy(array).bfloat16() for array in world.batch("a.q"))
        bits = y.clone().view(torch.uint16).numpy()
        world.delta.apply(world.plan, x, {0: y})
        world.delta.apply(world.plan, sidepath.bfloat16(x.view(torch.uint16).numpy()),
                          {0: sidepath.bfloat16(bits)})
        self.assertEqual(y.view(torch.uint16).numpy().tobytes(), bits.tobytes())

    def test_refused(self):
        world = World()
        x, y = (torch.from_numpy(array) for array in world.batch("a.q"))
        for bad in x.double(), x.to_sparse(), x.to("meta"), x[:, ::2]:
            with self.assertRaises(sidepath.WrongCall):
                world.delta.apply(world.plan, bad, {0: y})

    def test_dlpack(self):
        adapter = sidepath.Adapter.open(FIXTURES / "qwen3-tied/adapters/plain-r8",
                                        FIXTURES / "qwen3-tied")
        for site in adapter.sites:
            for factor in site.a, site.b:
                tensor = torch.from_dlpack(factor)
                numpy.testing.assert_array_equal(tensor.float().numpy(), numpy.asarray(factor))
        del tensor, factor, site
        gc.collect()
        self.assertEqual(len(sidepath.arrays._lent), 0)


class Peft(unittest.TestCase):
    def test_a_model_is_the_directory_that_it_saves(self):
        """Digest and receipt, for several kinds of configs and types."""
        for config in ({"r": 8, "target_modules": ["q_proj", "v_proj"]},
                       {"r": 4, "target_modules": "all-linear", "use_rslora": True},
                       {"r": 4, "target_modules": ["down_proj"], "rank_pattern": {"0.mlp": 2},
                        "alpha_pattern": {"1.mlp.down_proj": 3}},
                       {"r": 4, "target_modules": ["lm_head", "k_proj"]}):
            for dtype in torch.float32, torch.bfloat16:
                model = peft.get_peft_model(load().to(dtype), peft.LoraConfig(
                    lora_alpha=8, task_type="CAUSAL_LM", init_lora_weights=False, **config))
                with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
                    model.save_pretrained(folder)
                    opened = sidepath.Adapter.open(folder, DEMO / "base", name="policy")
                memory = sidepath.Adapter.from_peft(model, DEMO / "base", name="policy")
                self.assertEqual(memory.digest, opened.digest, config)
                self.assertEqual(memory.receipt().json, opened.receipt().json, config)

    def test_no_such_adapter(self):
        with self.assertRaisesRegex(sidepath.WrongCall, "none"):
            sidepath.Adapter.from_peft(load(), DEMO / "base")


class Attached(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        torch.set_grad_enabled(False)
        cls.model = load()
        cls.ids = torch.randint(3, 2000, (4, 9), generator=torch.Generator().manual_seed(1))
        cls.bare = cls.model(cls.ids).logits

    def attach(self, **keywords):
        host = sidepath.transformers.attach(self.model, **{"rank": 16, **keywords})
        self.addCleanup(host.close)
        for name in NAMES:
            host.load(name, DEMO / "adapters" / name)
        return host

    def test_peft_and_the_bare_model(self):
        host = self.attach()
        with host.batch([None, *NAMES]):
            mixed = self.model(self.ids).logits
        self.assertTrue(torch.equal(mixed[0].view(torch.int32), self.bare[0].view(torch.int32)))
        with host.batch([None] * 4):
            alone = self.model(self.ids).logits
        self.assertTrue(torch.equal(alone.view(torch.int32), self.bare.view(torch.int32)))
        host.close()
        self.assertTrue(torch.equal(self.model(self.ids).logits, self.bare))
        for row, name in enumerate(NAMES, 1):
            truth = peft.PeftModel.from_pretrained(load(), DEMO / "adapters" / name)
            error = (truth(self.ids).logits[row] - mixed[row]).abs().max()
            self.assertLess(float(error), 1e-3, name)
            self.assertGreater(float((self.bare[row] - mixed[row]).abs().max()), 0.1)

    def test_generate(self):
        host = self.attach(slots=2)
        settings = {"attention_mask": torch.ones_like(self.ids), "max_new_tokens": 8,
                    "do_sample": False, "eos_token_id": [], "pad_token_id": 0}
        mixed = self.model.generate(self.ids, **settings, adapters=["csource", None, "sqldoc",
                                                                    "csource"])
        for row, name in enumerate(["csource", None, "sqldoc", "csource"]):
            batch = self.model.generate(self.ids, **settings, adapters=[name] * 4)
            self.assertTrue(torch.equal(batch[row], mixed[row]), row)
        self.assertTrue(torch.equal(self.model.generate(self.ids, **settings)[1], mixed[1]))
        # Two slots for three adapters: in turn, and by a path.
        path = DEMO / "adapters/scripture"
        once = self.model.generate(self.ids, **settings, adapters=[path, None, path, None])
        again = self.model.generate(self.ids, **settings, adapters=["scripture", None] * 2)
        self.assertTrue(torch.equal(once, again))
        beams = self.model.generate(self.ids, **{**settings, "num_beams": 3, "pad_token_id": 1},
                                    adapters=["csource", None, "sqldoc", None])
        plain = self.model.generate(self.ids, **{**settings, "num_beams": 3, "pad_token_id": 1})
        self.assertTrue(torch.equal(beams[3], plain[3]))
        self.assertFalse(torch.equal(beams[0], plain[0]))
        with self.assertRaisesRegex(sidepath.WrongCall, "2 slots"):
            self.model.generate(self.ids, **settings, adapters=[*NAMES, None])

    def test_errors_name_things(self):
        host = self.attach()
        for call, words in (
                (lambda: self.model.generate(self.ids, adapters=["csource"]), "1 adapters for 4"),
                (lambda: self.model.generate(self.ids, adapters=["nobody"] * 4), "nobody"),
                (lambda: host.load("x", FIXTURES / "qwen3-tied/adapters/plain-r8"), "q_proj"),
                (lambda: host.load("x", FIXTURES / "qwen3-tied/adapters/dora"), "use_dora"),
                (lambda: host.unload("nobody"), "nobody")):
            with self.assertRaises(sidepath.SidepathError) as caught:
                call()
            self.assertIn(words, str(caught.exception))
        with host.batch([*NAMES]), self.assertRaisesRegex(sidepath.WrongCall, "for 3 adapters"):
            self.model(self.ids)
        with host.batch([*NAMES, None]), torch.enable_grad(), \
                self.assertRaisesRegex(sidepath.WrongCall, "no_grad"):
            self.model(self.ids)

    def test_a_model_that_trains_is_published_here(self):
        """A name means its newest content from the next batch on."""
        host, seen = self.attach(), set()
        with torch.enable_grad():
            trained = peft.get_peft_model(load(), peft.LoraConfig(
                r=4, target_modules=["q_proj"], task_type="CAUSAL_LM", init_lora_weights=False))
        for step in range(3):
            next(p for p in trained.parameters() if p.requires_grad).data += 0.25
            seen.add(host.load("policy", trained))
            with host.batch(["policy"]):
                ours = self.model(self.ids[:1]).logits
            self.assertLess(float((ours - trained(self.ids[:1]).logits).abs().max()), 1e-3, step)
        self.assertEqual(len(seen), 3)


if __name__ == "__main__":
    unittest.main()
