"""The engine in process: transformers' greedy tokens, scores against samples, publishes beside
running requests; and the client against a server."""

import gc
import json
import os
import threading
import unittest

import numpy
import sidepath
from fixtures import DEMO
from sidepath.adapter import read_directory
from sidepath.client import safetensors_bytes

BASE, ADAPTERS = DEMO / "base", DEMO / "adapters"
NAMES = "csource", "scripture", "sqldoc"
MARGIN = 1e-3


def open_engine(names=NAMES, **options):
    options = {"device": "cpu", "threads": 1, "max_lora_rank": 16, "max_context": 256,
               "max_running": 16, "host_bytes_max": 1 << 28, **options}
    return sidepath.Engine(BASE, {name: ADAPTERS / name for name in names}, **options)


def memory(name, change=None):
    """An adapter of the demo as float32 arrays, and its config."""
    tensors, config = read_directory(ADAPTERS / name)
    arrays = {}
    for key, view in tensors.items():
        raw = sidepath.adapter.ffi.buffer(view.pointer, 4 * view.shape[0] * view.shape[1])
        arrays[key] = numpy.frombuffer(raw, "<f4").reshape(view.shape).copy()
    if change is not None:
        arrays[sorted(arrays)[0]].view("<u4").flat[change] ^= 1
    return arrays, json.loads(config)


class Answers(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.exact = open_engine(precision="f32")
        cls.engine = open_engine()

    @classmethod
    def tearDownClass(cls):
        cls.exact.close()
        cls.engine.close()

    def test_greedy_is_that_of_transformers(self):
        """One mixed batch of all adapters and the base, up to the first near tie."""
        golden = json.loads((DEMO / "golden/greedy.json").read_text())["models"]
        work = [(None if name == "base" else name, prompt) for name, model in golden.items()
                for prompt in model]
        self.assertGreaterEqual(len(work), 28)
        asked = [prompt["prompt_ids"] for _, prompt in work]
        done = self.exact.generate(asked, [name for name, _ in work], max_tokens=40,
                                   ignore_eos=True)
        compared = 0
        for (name, prompt), completion in zip(work, done):
            if prompt["min_margin"] < MARGIN:
                continue
            self.assertEqual(completion.tokens, prompt["new_ids"][:40], name)
            self.assertEqual((completion.finish_reason, completion.adapter), ("length", name))
            compared += 1
        self.assertGreater(compared, 10)

    def test_scores_are_those_of_sampling(self):
        names = [None, *NAMES] * 3
        done = self.engine.generate(["In the beginning"] * 12, names, max_tokens=24, seed=5,
                                    temperature=0.8, logprobs=True, ignore_eos=True)
        self.assertGreater(len({tuple(completion.tokens) for completion in done}), 8)
        scores = self.engine.score([c.prompt_tokens + c.tokens for c in done], names)
        for completion, score in zip(done, scores):
            self.assertEqual(len(score), len(completion.prompt_tokens) + 23)
            self.assertEqual(score[len(completion.prompt_tokens) - 1:], completion.logprobs)

    def test_processed(self):
        settings = {"temperature": 0.7, "top_k": 5, "processed_logprobs": True, "seed": 3}
        done = self.engine.generate(["In"], "csource", max_tokens=8, logprobs=True, **settings)[0]
        self.assertEqual(len(done.processed_logprobs), 8)
        only = self.engine.generate(["In"], "csource", max_tokens=8, **{**settings, "top_k": 1})[0]
        self.assertEqual((only.processed_logprobs, only.logprobs), ([0.0] * 8, []))
        ids, prompt = done.prompt_tokens + done.tokens, len(done.prompt_tokens)
        again = self.engine.generate([ids], "csource", max_tokens=0, prompt_logprobs=True,
                                     scored_from=prompt, **settings)[0]
        self.assertEqual((again.processed_logprobs, again.prompt_logprobs),
                         (done.processed_logprobs, done.logprobs))
        self.assertEqual(self.engine.score([ids], "csource", prompt_lengths=prompt),
                         [done.logprobs])

    def test_rows_are_their_own(self):
        together = self.engine.generate(["static int"] * 4, [None, *NAMES], max_tokens=8,
                                        logprobs=True, temperature=1.0)
        for index, completion in enumerate(together):
            alone = self.engine.generate(["static int"], completion.adapter, max_tokens=8,
                                         logprobs=True, temperature=1.0, seed=index)[0]
            self.assertEqual((alone.tokens, alone.logprobs, alone.text),
                             (completion.tokens, completion.logprobs, completion.text))

    def test_text(self):
        text = "Übung 1 and\nmore"
        tokens = self.engine.encode(text)
        self.assertEqual(self.engine.decode(tokens), text)
        self.assertEqual(self.engine.encode(""), [])
        stopped = self.engine.generate(["/*"], "csource", max_tokens=40, stop=[" "])[0]
        self.assertEqual(stopped.finish_reason, "stop")
        self.assertNotIn(" ", stopped.text)
        self.assertEqual(stopped.logprobs, [])
        top = self.engine.generate(["/*"], max_tokens=2, logprobs=True, top_logprobs=3)[0]
        self.assertEqual([len(row) for row in top.top_logprobs], [3, 3])
        self.assertEqual(max(top.top_logprobs[0].values()), top.logprobs[0])

    def test_errors_name_things(self):
        for call, kind, words in (
                (lambda: self.engine.generate(["a"], "nobody"), sidepath.Refused, "nobody"),
                (lambda: self.engine.generate(["a"], temprature=1), sidepath.WrongCall,
                 "temprature"),
                (lambda: self.engine.generate(["a"], temperature="hot"), sidepath.WrongCall,
                 "temperature"),
                (lambda: self.engine.generate(["a"], temperature=-1.0), sidepath.SidepathError,
                 "temperature"),
                (lambda: self.engine.generate(["a", "b"], ["csource"]), sidepath.WrongCall,
                 "1 adapters for 2"),
                (lambda: self.engine.score([[1, 2]], prompt_lengths=[1, 2]), sidepath.WrongCall,
                 "2 lengths"),
                (lambda: self.engine.generate([[99999]]), sidepath.Refused, "99999"),
                (lambda: self.engine.generate([[1] * 300]), sidepath.Refused, "256"),
                (lambda: self.engine.load("x", DEMO / "nowhere"), sidepath.Refused, "nowhere"),
                (lambda: self.engine.publish("x", {}), sidepath.WrongCall, "PeftModel"),
                (lambda: self.engine.publish("a:b", *memory("sqldoc")), sidepath.Refused, "a:b"),
                (lambda: self.engine.unload("nobody"), sidepath.Refused, "nobody"),
                (lambda: sidepath.Engine(DEMO / "nowhere"), sidepath.Refused, "nowhere"),
                (lambda: sidepath.Engine(BASE, device="cpu", max_lora=3), sidepath.WrongCall,
                 "max_lora")):
            with self.assertRaises(kind) as caught:
                call()
            self.assertIn(words, str(caught.exception))
        # Nothing of a refused batch is left behind.
        self.assertEqual(self.engine._running, {})

    def test_an_interrupted_batch_leaves_nothing(self):
        step, calls = self.engine._step, []

        def interrupted():
            calls.append(1)
            if len(calls) == 3:
                raise KeyboardInterrupt
            step()

        self.engine._step = interrupted
        try:
            with self.assertRaises(KeyboardInterrupt):
                self.engine.generate(["a"] * 4, max_tokens=200)
        finally:
            del self.engine._step
        self.assertEqual(self.engine._running, {})
        self.assertEqual(len(self.engine.generate(["a"], max_tokens=2)[0].tokens), 2)


class Publishing(unittest.TestCase):
    def test_memory_and_directory_are_one_version(self):
        with open_engine(()) as engine:
            published = engine.publish("memory", *memory("csource"))
            loaded = engine.load("disk", ADAPTERS / "csource")
            self.assertEqual(published.digest, loaded.digest)
            self.assertEqual(published.digest, sidepath.inspect(ADAPTERS / "csource").digest)
            self.assertEqual(published.receipt["verdict"], "accepted")
            self.assertEqual(set(engine.adapters), {"memory", "disk"})
            a, b = engine.generate(["static"] * 2, ["memory", "disk"], max_tokens=12)
            self.assertEqual((a.tokens, a.adapter_digest), (b.tokens, published.digest))
            engine.unload("memory")
            self.assertEqual(set(engine.adapters), {"disk"})
            self.assertRaises(sidepath.Refused, engine.generate, ["a"], "memory")

    def test_every_bit_is_another_version(self):
        with open_engine(()) as engine:
            seen, generation = [], 0
            for change in range(12):
                found = engine.publish("policy", *memory("sqldoc", change),
                                       expected_generation=generation)
                self.assertGreater(found.generation, generation)
                generation = found.generation
                seen.append(found.digest)
                done = engine.generate(["The"], "policy", max_tokens=2)[0]
                self.assertEqual(done.adapter_digest, found.digest)
            self.assertEqual(len(set(seen)), 12)
            with self.assertRaises(sidepath.WrongCall) as caught:
                engine.publish("policy", *memory("sqldoc"), expected_generation=generation - 1)
            self.assertEqual(caught.exception.code, "generation-changed")
            bad, config = memory("sqldoc")
            bad[sorted(bad)[0]][0, 0] = numpy.nan
            with self.assertRaises(sidepath.Refused) as caught:
                engine.publish("policy", bad, config)
            self.assertEqual(caught.exception.code, "non-finite")
            self.assertEqual(engine.adapters["policy"].digest, seen[-1])

    def test_beside_running_requests(self):
        """Another thread publishes while a batch runs: each answer is that of its digest."""
        with open_engine(()) as engine:
            digests = {engine.publish("quiet%d" % i, *memory(name)).digest: "quiet%d" % i
                       for i, name in enumerate(NAMES)}
            engine.publish("policy", *memory("csource"))
            stop, published = threading.Event(), []

            def publisher():
                while not stop.is_set():
                    name = NAMES[len(published) % 3]
                    published.append(engine.publish("policy", *memory(name)).digest)

            thread = threading.Thread(target=publisher)
            thread.start()
            done = []
            while len(published) < 9 and thread.is_alive():
                done += engine.generate(["int"] * 3, "policy", max_tokens=10, logprobs=True)
            stop.set()
            thread.join()
            for completion in done:
                quiet = engine.generate(["int"], digests[completion.adapter_digest],
                                        max_tokens=10, logprobs=True)[0]
                self.assertEqual((quiet.tokens, quiet.logprobs),
                                 (completion.tokens, completion.logprobs))

    def test_no_slots(self):
        with open_engine((), max_loras=0) as engine:
            with self.assertRaises(sidepath.WrongCall) as caught:
                engine.publish("policy", *memory("csource"))
            self.assertIn(caught.exception.code, ("no-slots", ""))
            self.assertEqual(len(engine.generate(["a"], max_tokens=2)[0].tokens), 2)

    def test_lifetime(self):
        engine = open_engine(("sqldoc",))
        child = os.fork()
        if not child:
            try:
                engine.generate(["a"])
            except sidepath.WrongCall as refusal:
                os._exit(0 if refusal.code == "forked" else 1)
            os._exit(2)
        self.assertEqual(os.waitpid(child, 0)[1], 0)
        engine.close()
        engine.close()
        self.assertRaises(sidepath.Closed, engine.generate, ["a"])
        # A dropped engine goes at once: nothing refers back to it.
        dropped = open_engine(())._owner
        self.assertIsNone(dropped._destroy)
        gc.collect()


class Bodies(unittest.TestCase):
    def test_safetensors(self):
        """The client's file, read by other code: shapes, order, strided tensors, metadata."""
        base = numpy.arange(24, dtype="<f4").reshape(4, 6)
        tensors = {"a": base, "b": base.T, "c": base[::2, 1:4], "d": base.astype("<f2"),
                   "e": sidepath.bfloat16((base.view("<u4") >> 16).astype("<u2")),
                   "f": numpy.zeros((0, 3), "<f4")}
        data = safetensors_bytes(tensors, {"r": 4})
        begin = 8 + int.from_bytes(data[:8], "little")
        header = json.loads(data[8:begin])
        self.assertEqual(begin % 8, 0)
        self.assertEqual(json.loads(header.pop("__metadata__")["adapter_config"]), {"r": 4})
        kinds = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}
        offset = 0
        for name, tensor in tensors.items():
            entry = header[name]
            self.assertEqual(entry["data_offsets"][0], offset)
            offset = entry["data_offsets"][1]
            raw = numpy.frombuffer(data[begin:][slice(*entry["data_offsets"])],
                                   kinds[entry["dtype"]]).reshape(entry["shape"])
            truth = tensor.bits if name == "e" else tensor
            numpy.testing.assert_array_equal(raw, truth)
        self.assertEqual(begin + offset, len(data))

    def test_urls(self):
        for url in "localhost:80", "ftp://host", "":
            self.assertRaises(sidepath.WrongCall, sidepath.Client, url)


if __name__ == "__main__":
    unittest.main()
