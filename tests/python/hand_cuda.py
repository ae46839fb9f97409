"""By hand, on a machine with a GPU: the package with torch's CUDA tensors and streams.
    check_package.py SIDEPATH LIBRARY CC hand_cuda"""

import unittest
import warnings

import numpy
import sidepath
import sidepath.transformers
import torch
import transformers
from fixtures import DEMO
from test_delta import SHAPES, World, make_adapter

NAMES = "csource", "scripture", "sqldoc"


class OnlyDlpack:
    """A tensor of a package that is known by DLPack alone."""

    def __init__(self, tensor):
        self.tensor = tensor

    def __dlpack__(self):
        return self.tensor.__dlpack__()


class Deltas(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.device = sidepath.Device("cuda")
        cls.world = World("bf16", cls.device)

    def batch(self, name="a.q", seed=9):
        return [torch.from_numpy(array).bfloat16().cuda()
                for array in self.world.batch(name, seed)]

    def applied(self, x, y, **keywords):
        y = y.clone()
        self.world.delta.apply(self.world.plan, x, {0: y}, **keywords)
        torch.cuda.synchronize()
        return y

    def test_against_double_precision(self):
        for site, name in enumerate(SHAPES):
            x, y = self.batch(name)
            host_x = x.float().cpu().numpy()
            truth = self.world.truth(name, host_x, y.float().cpu().numpy())
            base = [which is None or scale == 0 for which, scale in self.world.rows]
            before = y.clone()
            self.world.delta.apply(self.world.plan, x, {site: y})
            error = numpy.abs(y.float().cpu().numpy() - truth)
            self.assertTrue((error <= self.world.bf16_bound(name, host_x, truth)).all())
            self.assertTrue(torch.equal(before[base].view(torch.int16),
                                        y[base].view(torch.int16)))
            self.assertFalse(torch.equal(before, y))

    def test_rows_are_their_own(self):
        x, y = self.batch()
        together, single = self.applied(x, y), sidepath.Plan(1, 4)
        for row, (which, scale) in enumerate(self.world.rows):
            version = None if which is None else self.world.versions[which]
            alone = y[row:row + 1].clone()
            single.build(self.world.pool, [(version, 1, scale)])
            self.world.delta.apply(single, x[row:row + 1], {0: alone})
            self.assertTrue(torch.equal(alone[0], together[row]), row)

    def test_streams(self):
        """The current stream, one by its number, and in order with its work."""
        x, y = self.batch()
        truth = self.applied(x, y)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            late = torch.zeros_like(x)
            torch.cuda._sleep(20_000_000)
            late.copy_(x)  # comes after the sleep: an apply on another stream would see zeros
            out = y.clone()
            self.world.delta.apply(self.world.plan, late, {0: out})
        stream.synchronize()
        self.assertTrue(torch.equal(out, truth))
        self.assertTrue(torch.equal(self.applied(x, y, stream=torch.cuda.Stream()), truth))
        self.assertTrue(torch.equal(
            self.applied(x, y, stream=torch.cuda.current_stream().cuda_stream), truth))

    def test_graphs(self):
        world = self.world
        x, y = self.batch()
        truth, out, plan = self.applied(x, y), y.clone(), sidepath.Plan(64, 4)
        spans = [(None if which is None else world.versions[which], 1, scale)
                 for which, scale in world.rows]
        plan.build(world.pool, spans)
        stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream):
            self.device.current_stream()  # known before the capture
            world.delta.upload(plan)
            stream.synchronize()
            with torch.cuda.graph(graph, stream=stream):
                world.delta.start(plan)
                world.delta.apply(plan, x, {0: out})
            graph.replay()
            stream.synchronize()
            self.assertTrue(torch.equal(out, truth))
            plan.build(world.pool, [(None, len(spans))])
            world.delta.upload(plan)
            graph.replay()
            stream.synchronize()
        self.assertTrue(torch.equal(out, truth))  # all rows were the base's

    def test_dlpack_and_places(self):
        x, y = self.batch()
        truth, out = self.applied(x, y), y.clone()
        self.world.delta.apply(self.world.plan, OnlyDlpack(x), {0: OnlyDlpack(out)})
        torch.cuda.synchronize()
        self.assertTrue(torch.equal(out, truth))
        for bad_x, bad_y in (x.cpu(), y), (x, y.cpu()):
            with self.assertRaises(sidepath.WrongCall) as caught:
                self.world.delta.apply(self.world.plan, bad_x, {0: bad_y})
            self.assertEqual(caught.exception.code, "wrong-device")

    def test_slots_are_those_of_the_cpu(self):
        for version, other in zip(self.world.versions, World("bf16").versions):
            self.assertEqual(self.world.pool.read(version), other.pool.read(other))

    def test_tensors_of_a_gpu_are_an_adapter(self):
        adapter, factors = make_adapter(self.world.geometry, 4, 3)
        tensors = {"base_model.model.layers.0.%s.lora_%s.weight" % (name, letter):
                   torch.from_numpy(array).cuda() for name, pair in factors.items()
                   for letter, array in zip("AB", pair)}
        config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q", "k", "up"]}
        with self.assertRaises(sidepath.WrongCall):
            sidepath.Adapter.from_tensors(tensors, config, self.world.geometry)
        memory = sidepath.Adapter.from_tensors(tensors, config, self.world.geometry,
                                               device=self.device)
        self.assertEqual(memory.digest, adapter.digest)


class Attached(unittest.TestCase):
    def test_a_model_on_the_gpu(self):
        warnings.filterwarnings("ignore")
        torch.set_grad_enabled(False)
        model = transformers.AutoModelForCausalLM.from_pretrained(DEMO / "base")
        model = model.bfloat16().cuda().eval()
        ids = torch.randint(3, 2000, (4, 9), generator=torch.Generator().manual_seed(1)).cuda()
        bare = model(ids).logits
        with sidepath.transformers.attach(model, rank=16) as host:
            for name in NAMES:
                host.load(name, DEMO / "adapters" / name)
            with host.batch([None, *NAMES]):
                mixed = model(ids).logits
            self.assertTrue(torch.equal(mixed[0].view(torch.int16), bare[0].view(torch.int16)))
            tokens = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8,
                                    do_sample=False, adapters=[None, *NAMES])
            self.assertEqual(tokens.shape[0], 4)
        host = sidepath.transformers.attach(model.cpu().float(), rank=16)
        for name in NAMES:
            host.load(name, DEMO / "adapters" / name)
        with host.batch([None, *NAMES]):
            exact = model(ids.cpu()).logits
        difference = (mixed.float().cpu() - exact).norm() / exact.norm()
        self.assertLess(float(difference), 0.03)  # bf16 against float32
        self.assertGreater(float((exact[1:] - bare.float().cpu()[1:]).norm() / exact.norm()), 0.1)
        host.close()


if __name__ == "__main__":
    unittest.main()
