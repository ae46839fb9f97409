"""The resolver inside vLLM, by hand where vLLM is installed: its loader of plugins, its list of
models and its reader of adapters are its own, and only the engine, which needs a GPU, is not."""

import asyncio
import os
import types
import unittest

import sidepath
import sidepath.vllm
import vllm.lora.lora_model
from fixtures import FIXTURES
from vllm.entrypoints.openai.models.protocol import BaseModelPath
from vllm.entrypoints.openai.models.serving import OpenAIServingModels
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper

MODEL = FIXTURES / "qwen3-tied"
LINEAR = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


class Engine:
    """What the list of models wants of an engine. It notes what it is to load."""

    model_config = types.SimpleNamespace(model=str(MODEL), max_model_len=64)
    renderer = input_processor = None

    def __init__(self):
        self.loaded = []

    async def add_lora(self, request):
        self.loaded.append(request)
        return True


class InsideVllm(unittest.TestCase):
    def setUp(self):
        os.environ.update(SIDEPATH_VLLM_ADAPTERS=str(MODEL / "adapters"),
                          SIDEPATH_VLLM_BASE=str(MODEL))
        sidepath.vllm.register()
        self.engine = Engine()
        self.models = OpenAIServingModels(self.engine, [BaseModelPath("base", str(MODEL))])

    def resolve(self, name):
        return asyncio.run(self.models.resolve_lora(name))

    def test_a_whole_adapter_is_loaded_once(self):
        first = self.resolve("plain-r8")
        self.assertIs(self.resolve("plain-r8"), first)
        self.assertEqual(self.engine.loaded, [first])
        self.assertEqual(first.lora_path, str((MODEL / "adapters/plain-r8").resolve()))

    def test_what_would_be_left_out_never_reaches_the_engine(self):
        for name in ("save-head", "tokens", "dora"):
            self.assertRaises(sidepath.Refused, self.resolve, name)
        self.assertEqual(self.resolve("nobody").error.code, 404)
        self.assertEqual(self.engine.loaded, [])

    def test_its_reader_takes_every_pair_of_what_was_given(self):
        vllm.lora.lora_model.PIN_MEMORY = False  # as where there is no GPU
        for name in ("plain-r8", "ffn"):
            path = self.resolve(name).lora_path
            read = LoRAModel.from_local_checkpoint(
                path, LINEAR, PEFTHelper.from_local_dir(path, 64), lora_model_id=1, device="cpu")
            with sidepath.Adapter.open(path, MODEL) as adapter:
                self.assertEqual(len(read.loras), len(adapter.sites), name)


if __name__ == "__main__":
    unittest.main()
