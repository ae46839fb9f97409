"""The resolver for vLLM against stand-ins of the two modules whose interface it has to meet."""

import asyncio
import os
import sys
import types
import unittest

import sidepath
import sidepath.vllm
from fixtures import DEMO, FIXTURES

MODEL = FIXTURES / "qwen3-tied"


class Request:
    def __init__(self, lora_name, lora_int_id, lora_path):
        self.name, self.number, self.path = lora_name, lora_int_id, lora_path


def stand_ins(registered):
    """vllm.lora.resolver and vllm.lora.request, as far as a resolver sees them."""
    names = "vllm", "vllm.lora", "vllm.lora.resolver", "vllm.lora.request"
    made = {name: types.ModuleType(name) for name in names}
    made["vllm.lora.resolver"].LoRAResolver = type("LoRAResolver", (), {})
    made["vllm.lora.resolver"].LoRAResolverRegistry = types.SimpleNamespace(
        register_resolver=lambda name, resolver: registered.update({name: resolver}))
    made["vllm.lora.request"].LoRARequest = Request
    return made


class Resolver(unittest.TestCase):
    def setUp(self):
        self.registered = {}
        self.before = dict(sys.modules)
        sys.modules.update(stand_ins(self.registered))
        os.environ.update(SIDEPATH_VLLM_ADAPTERS=str(MODEL / "adapters"),
                          SIDEPATH_VLLM_BASE=str(MODEL))

    def tearDown(self):
        for name in set(sys.modules) - set(self.before):
            if name.startswith("vllm"):
                del sys.modules[name]
        os.environ.pop("SIDEPATH_VLLM_ADAPTERS", None)
        os.environ.pop("SIDEPATH_VLLM_BASE", None)

    def resolve(self, name):
        sidepath.vllm.register()
        return asyncio.run(self.registered["sidepath"].resolve_lora("any alias", name))

    def test_whole_adapters_are_given(self):
        request = self.resolve("plain-r8")
        self.assertEqual((request.name, request.path),
                         ("plain-r8", str((MODEL / "adapters/plain-r8").resolve())))
        self.assertGreater(request.number, 0)
        self.assertEqual(self.resolve("plain-r8").number, request.number)
        self.assertNotEqual(self.resolve("ffn").number, request.number)

    def test_what_would_be_left_out_is_refused(self):
        for name, code in (("save-head", "vllm-drops-rows"), ("tokens", "vllm-drops-rows"),
                           ("save-embed", "vllm-drops-rows"), ("dora", "dora")):
            with self.assertRaises(sidepath.Refused) as caught:
                self.resolve(name)
            self.assertEqual(caught.exception.code, code, name)
        with self.assertRaises(sidepath.Refused):
            self.resolve("lora-bias")

    def test_names_stay_inside(self):
        for name in ("nobody", "../adapters/plain-r8/..", "../../qwen3-untied/adapters/plain-r8",
                     "", "/etc"):
            self.assertIsNone(self.resolve(name), name)

    def test_settings(self):
        os.environ["SIDEPATH_VLLM_BASE"] = str(DEMO / "nowhere")
        self.assertRaisesRegex(sidepath.WrongCall, "SIDEPATH_VLLM_BASE", sidepath.vllm.register)
        del os.environ["SIDEPATH_VLLM_BASE"], os.environ["SIDEPATH_VLLM_ADAPTERS"]
        sidepath.vllm.register()
        self.assertEqual(self.registered, {})

    def test_nothing_of_vllm_is_imported(self):
        self.assertNotIn("vllm", self.before)


if __name__ == "__main__":
    unittest.main()
