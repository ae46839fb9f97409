"""The client against a server on the demo: what it publishes, and what it raises."""

import os
import sys
import unittest
from pathlib import Path

import numpy
import sidepath
from fixtures import ROOT
from test_engine import memory, open_engine

sys.path.insert(0, str(ROOT / "tests/server"))
import serving  # noqa: E402

BINARY = Path(os.environ["SIDEPATH_BINARY"])
FLAGS = "--max-lora-rank", 16, "--max-context", 256


class Client(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.server = serving.Server(BINARY, *FLAGS)
        cls.client = sidepath.Client(cls.server.url)
        cls.engine = open_engine(())

    @classmethod
    def tearDownClass(cls):
        cls.server.stop()
        cls.engine.close()

    def test_published_as_in_the_engine(self):
        """Digest, receipt and greedy tokens are those of the engine in process; every step is
        another version."""
        generation = 0
        for name in "csource", "sqldoc":
            tensors, config = memory(name)
            here = self.engine.publish("policy", tensors, config)
            there = self.client.publish("policy", tensors, config,
                                        expected_generation=generation)
            self.assertEqual((there.digest, there.receipt["digest"]), (here.digest, here.digest))
            self.assertGreater(there.generation, generation)
            generation = there.generation
            answer = self.client.generate("static int", "policy", max_tokens=12, temperature=0,
                                          return_token_ids=True)
            self.assertEqual(answer["adapter_digest"], here.digest)
            done = self.engine.generate(["static int"], "policy", max_tokens=12)[0]
            self.assertEqual(answer["choices"][0]["text"], done.text)
            ids = done.prompt_tokens + done.tokens
            self.assertEqual(self.client.score([ids, ids[:4]], "policy", adapter_digest=here.digest,
                                               prompt_lengths=[2, 1]),
                             self.engine.score([ids, ids[:4]], "policy", prompt_lengths=[2, 1]))
        with self.assertRaises(sidepath.NotYet) as caught:
            self.client.score([ids], "policy", min_generation=generation + 1)
        with self.assertRaises(sidepath.NotYet) as caught:
            self.client.publish("policy", tensors, config, expected_generation=generation - 1)
        self.assertEqual(caught.exception.code, "generation-changed")

    def test_refusals(self):
        tensors, config = memory("csource")
        first = sorted(tensors)[0]
        for changed, code in (({**tensors, first: tensors[first][:, 1:]}, "shape-mismatch"),
                              ({**tensors, first: tensors[first] * numpy.float32("nan")},
                               "non-finite")):
            with self.assertRaises(sidepath.Refused) as caught:
                self.client.publish("refused", changed, config)
            self.assertEqual(caught.exception.code, code)
        with self.assertRaises(sidepath.Refused):
            self.client.generate("a", "refused")
        with self.assertRaises(sidepath.Refused):
            self.client.publish("bad:name", tensors, config)

    def test_names_and_unloading(self):
        tensors, config = memory("csource", change=1)
        name = "team/new ä?#"
        digest = self.client.publish(name, tensors, config).digest
        self.assertEqual(self.client.generate("a", name, max_tokens=1)["adapter_digest"], digest)
        self.client.unload(name)
        with self.assertRaises(sidepath.Refused):
            self.client.generate("a", name)

    def test_nobody_there(self):
        with self.assertRaises(OSError):
            sidepath.Client("http://127.0.0.1:1").generate("a")


if __name__ == "__main__":
    unittest.main()
