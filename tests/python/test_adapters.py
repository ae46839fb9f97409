"""Adapters of the package are those of the program: receipts, refusals, digests and packed bytes of
every fixture, from the directory and from memory."""

import json
import os
import subprocess
import unittest
from concurrent.futures import ThreadPoolExecutor

import numpy
import sidepath
from fixtures import DEMO, FIXTURES, adapters
from sidepath.adapter import read_directory

BINARY = os.environ["SIDEPATH_BINARY"]


def inspected(model, folder):
    """What the program says: its JSON as text."""
    return subprocess.run([BINARY, "inspect", folder, "--model", model, "--json"],
                          capture_output=True, text=True, check=False).stdout


def packed(adapter):
    """Digest and bytes of its slot; or the refusal where no slot can hold it."""
    try:
        with sidepath.Layout(adapter.geometry, rank=max(adapter.rank, 1),
                             expert_rank=64) as layout, \
                sidepath.Pool(layout, 1, expert_bytes=1 << 22) as pool, \
                layout.pack(adapter) as image, pool.load(image) as version:
            return version.digest, (pool.read(version), image.expert_bytes, image.checksum)
    except sidepath.SidepathError as refusal:
        return refusal.args


class Fixtures(unittest.TestCase):
    def test_receipts_are_those_of_the_program(self):
        cases = list(adapters())
        self.assertGreater(len(cases), 140)
        with ThreadPoolExecutor(2) as pool:
            said = list(pool.map(lambda case: inspected(*case), cases))
        accepted = refused = 0
        for (model, folder), expected in zip(cases, said):
            try:
                receipt = sidepath.inspect(folder, model)
                self.assertEqual(receipt.json, expected, folder)
                accepted += 1
            except sidepath.Refused as refusal:
                fields = json.loads(expected)
                self.assertEqual(fields["verdict"], "refused", folder)
                self.assertEqual((refusal.code, refusal.text), (fields["code"], fields["message"]))
                refused += 1
        self.assertGreater(accepted, 100)
        self.assertGreater(refused, 20)

    def test_memory_gives_what_the_directory_gives(self):
        compared = bytes_of = 0
        for model, folder in adapters():
            try:
                tensors, config = read_directory(folder)
                opened = sidepath.Adapter.open(folder, model)
            except (ValueError, OSError):
                continue  # nothing that memory could hold; or refused: see below
            memory = sidepath.Adapter.from_tensors(tensors, config, model, name=folder.name)
            self.assertEqual(memory.digest, opened.digest, folder)
            self.assertEqual(memory.receipt().json, opened.receipt().json, folder)
            image = packed(opened)
            self.assertEqual(packed(memory), image, folder)
            compared += 1
            bytes_of += len(image) == 2
        self.assertGreater(compared, 100)
        self.assertGreater(bytes_of, 70)


class Memory(unittest.TestCase):
    MODEL, FOLDER = FIXTURES / "qwen3-tied", FIXTURES / "qwen3-tied/adapters/plain-r8"

    def arrays(self):
        """The fixture as float32 arrays of numpy."""
        adapter = sidepath.Adapter.open(self.FOLDER, self.MODEL)
        tensors = {}
        for site in adapter.sites:
            for name, factor in ("A", site.a), ("B", site.b):
                key = "base_model.model.%s.lora_%s.weight" % (site.path, name)
                tensors[key] = numpy.asarray(factor)
        return adapter, tensors, json.loads((self.FOLDER / "adapter_config.json").read_text())

    def test_factors_are_the_file(self):
        adapter, tensors, _ = self.arrays()
        stored, _ = read_directory(self.FOLDER)
        self.assertEqual(set(tensors), set(stored))
        for name, array in tensors.items():
            view = stored[name]
            raw = sidepath.adapter.ffi.buffer(view.pointer, array.size * (4 if view.dtype == "f32"
                                                                          else 2))
            if view.dtype == "bf16":
                truth = (numpy.frombuffer(raw, "<u2").astype("<u4") << 16).view("<f4")
            else:
                truth = numpy.frombuffer(raw, "<f4" if view.dtype == "f32" else "<f2")
            numpy.testing.assert_array_equal(array, truth.reshape(array.shape).astype("<f4"))

    def test_strided_and_cut_arrays_are_the_same_adapter(self):
        _, tensors, config = self.arrays()
        plain = sidepath.Adapter.from_tensors(tensors, config, self.MODEL)
        strided = {}
        for number, (name, array) in enumerate(tensors.items()):
            wide = numpy.full((array.shape[0] * 2, array.shape[1] + 3), numpy.nan, "<f4")
            wide[::2, 1:-2] = array
            strided[name] = wide[::2, 1:-2] if number % 2 else numpy.asfortranarray(array)
        same = sidepath.Adapter.from_tensors(strided, json.dumps(config), self.MODEL)
        self.assertEqual(same.digest, plain.digest)
        self.assertEqual(same.receipt(), plain.receipt())

    def test_one_bit_changes_the_digest(self):
        _, tensors, config = self.arrays()
        seen = set()
        for name in list(tensors)[:4] * 2:
            tensors[name] = tensors[name].copy()
            bits = tensors[name].view("<u4")
            bits.flat[len(seen) % bits.size] ^= 1
            seen.add(sidepath.Adapter.from_tensors(tensors, config, self.MODEL).digest)
        self.assertEqual(len(seen), 8)

    def test_what_comes_in_is_copied(self):
        _, tensors, config = self.arrays()
        adapter = sidepath.Adapter.from_tensors(tensors, config, self.MODEL)
        before = [numpy.asarray(site.a) for site in adapter.sites]
        for array in tensors.values():
            array[:] = 7
        for site, array in zip(adapter.sites, before):
            numpy.testing.assert_array_equal(numpy.asarray(site.a), array)

    def test_types(self):
        _, tensors, config = self.arrays()
        digests = set()
        for cast in (lambda a: a, lambda a: a.astype("<f2"), memoryview,
                     lambda a: sidepath.bfloat16((a.view("<u4") >> 16).astype("<u2"))):
            changed = {name: cast(array) for name, array in tensors.items()}
            adapter = sidepath.Adapter.from_tensors(changed, config, self.MODEL)
            digests.add(adapter.digest)
        self.assertEqual(len(digests), 3)  # a memoryview of float32 is float32
        factor = adapter.sites[0].a
        self.assertEqual(factor.dtype, "bf16")
        name = "base_model.model.%s.lora_A.weight" % adapter.sites[0].path
        truth = (tensors[name].view("<u4") & 0xffff0000).view("<f4")
        numpy.testing.assert_array_equal(numpy.asarray(factor), truth)

    def test_dlpack_out_and_in(self):
        _, tensors, config = self.arrays()
        adapter = sidepath.Adapter.from_tensors(tensors, config, self.MODEL)
        factor = adapter.sites[0].b
        array = numpy.from_dlpack(factor)
        again = sidepath.Adapter.from_tensors(
            {name: OnlyDlpack(value) for name, value in tensors.items()}, config, self.MODEL)
        self.assertEqual(again.digest, adapter.digest)
        adapter.close()
        del factor, again
        numpy.testing.assert_array_equal(
            array, tensors["base_model.model.%s.lora_B.weight" % "model.layers.0.self_attn.q_proj"])
        self.assertEqual(len(sidepath.arrays._lent), 1)
        del array
        self.assertEqual(len(sidepath.arrays._lent), 0)

    def test_errors_name_things(self):
        _, tensors, config = self.arrays()
        first = next(iter(tensors))

        def refused(code, subject, tensors=tensors, config=config, kind=sidepath.Refused):
            with self.assertRaises(kind) as caught:
                sidepath.Adapter.from_tensors(tensors, config, self.MODEL)
            self.assertEqual(caught.exception.code, code)
            self.assertIn(subject, caught.exception.subject)
            self.assertTrue(caught.exception.text)

        refused("shape-mismatch", first, {**tensors, first: tensors[first][:, :-1]})
        refused("non-finite", first, {**tensors, first: tensors[first] * numpy.float32("inf")})
        refused("dora", "use_dora", config={**config, "use_dora": True})
        refused("bad-tensor", first, {**tensors, first: tensors[first].astype("<f8")},
                kind=sidepath.WrongCall)
        refused("bad-tensor", first, {**tensors, first: "a text"}, kind=sidepath.WrongCall)
        refused("bad-config", "config", config={**config, "r": object()}, kind=sidepath.WrongCall)
        refused("bad-text", "name", {**tensors, "a\0b": tensors[first]}, kind=sidepath.WrongCall)
        with self.assertRaises(sidepath.Refused) as caught:
            sidepath.inspect(FIXTURES / "nowhere", self.MODEL)
        self.assertEqual(caught.exception.status_name, "SP_ERR_NOT_FOUND")
        with self.assertRaises(sidepath.WrongCall):
            sidepath.inspect(self.FOLDER, self.MODEL, precision="int4")
        with self.assertRaises(sidepath.WrongCall):
            sidepath.inspect(self.FOLDER, self.MODEL, allow=["anything"])

    def test_without_a_base(self):
        receipt = sidepath.inspect(DEMO / "adapters/sqldoc")
        self.assertEqual(receipt.verdict, "unchecked")
        self.assertEqual(receipt.digest, sidepath.inspect(DEMO / "adapters/sqldoc",
                                                          DEMO / "base").digest)


class OnlyDlpack:
    """An array of a package that is known by DLPack alone."""

    def __init__(self, array):
        self.array = array

    def __dlpack__(self):
        return self.array.__dlpack__()


class Geometries(unittest.TestCase):
    def test_by_hand_is_as_from_a_config(self):
        model = sidepath.Geometry.open(DEMO / "base")
        parsed = sidepath.Geometry.parse((DEMO / "base/config.json").read_text())
        self.assertEqual(list(parsed), list(model))
        hand = sidepath.Geometry(list(model))
        self.assertEqual(list(hand), list(model))
        site = hand.find("layers.3.mlp.up_proj")
        self.assertEqual(hand[site].path, "model.layers.3.mlp.up_proj")
        self.assertEqual(hand.find("layers.99.mlp.up_proj"), -1)
        with self.assertRaises(IndexError):
            hand[len(hand)]
        for folder in sorted((DEMO / "adapters").iterdir()):
            with self.subTest(folder.name):
                self.assertEqual(sidepath.Adapter.open(folder, hand).digest,
                                 sidepath.Adapter.open(folder, model).digest)

    def test_refused_rows(self):
        for site, code in (sidepath.Site("", 4, 4), ""), (sidepath.Site("a.b", 0, 4), ""), (
                sidepath.Site("a.b", 4, 4, "strange"), "bad-kind"):
            with self.assertRaises(sidepath.WrongCall) as caught:
                sidepath.Geometry([site])
            self.assertEqual(caught.exception.code, code)


if __name__ == "__main__":
    unittest.main()
