#!/usr/bin/env python3
"""What the Python package costs over the C interface, call by call:

    bench/bench_python.py OUT.json [ROUNDS]

`delta.apply` of numpy arrays and torch tensors against the bare C function called through cffi with
everything prepared, on shapes so small that the sums cost little; plans, loads, adapters from
memory; importing the package, attaching to a transformers model and its first mixed batch. Medians
of ROUNDS (200) rounds, the two sides in turns, of processor time: others may share the machine. By
hand: needs the package, numpy, torch and transformers."""

import json
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy
import sidepath
import torch
import transformers
from sidepath._library import NULL, ffi, lib
from sidepath.adapter import read_directory

DEMO = Path(__file__).resolve().parents[1] / "demo"
ROWS = 4, 64
INNER = 20


def median_us(functions, rounds):
    """Microseconds a call of each, in turns, of this thread's processor time."""
    times = {name: [] for name in functions}
    for _ in range(rounds):
        for name, function in functions.items():
            begin = time.thread_time()
            for _ in range(INNER):
                function()
            times[name].append((time.thread_time() - begin) / INNER * 1e6)
    return {name: round(statistics.median(row), 2) for name, row in times.items()}


def prepared(delta, plan, x, outputs):
    """One call of the C function with its structs filled in once."""
    rows = ffi.new("sp_delta_output[]", len(outputs))
    for row, (site, y) in zip(rows, outputs.items()):
        row.struct_bytes, row.site, row.y_type = ffi.sizeof("sp_delta_output"), site, 0
        row.y, row.y_stride = ffi.cast("void *", y.ctypes.data), y.shape[1]
    call = ffi.new("sp_delta_call *")
    call.struct_bytes, call.plan, call.n_outputs = ffi.sizeof("sp_delta_call"), plan, len(outputs)
    call.x, call.x_stride, call.outputs = ffi.cast("void *", x.ctypes.data), x.shape[1], rows

    def run():
        if lib.sp_delta_apply(delta, call, NULL) != 0:
            raise RuntimeError("sp_delta_apply failed")
    run.keep = rows, x, outputs
    return run


def deltas(rounds):
    """apply at one site and at a group of three, of the demo's adapters in float32."""
    geometry = sidepath.Geometry.open(DEMO / "base")
    pool = sidepath.Pool(sidepath.Layout(geometry, rank=16, dtype="f32"), 4)
    versions = [pool.load(sidepath.Adapter.open(DEMO / "adapters" / name, geometry))
                for name in ("csource", "scripture", "sqldoc")]
    delta = sidepath.Delta(pool, 64)
    sites = [geometry.find("model.layers.0.self_attn.%s_proj" % part) for part in "qkv"]
    for n in ROWS:
        plan = sidepath.Plan(64, 4)
        spans = [(versions[row % 3], 1) for row in range(n)]
        plan.build(pool, spans)
        x = numpy.ones((n, geometry[sites[0]].k_in), "<f4")
        ys = {site: numpy.ones((n, geometry[site].n_out), "<f4") for site in sites}
        tensors = {site: torch.from_numpy(y) for site, y in ys.items()}
        tensor_x = torch.from_numpy(x)
        for count in 1, 3:
            some, some_tensors = dict(list(ys.items())[:count]), dict(list(tensors.items())[:count])
            cell = median_us({
                "c": prepared(delta._pointer, plan._pointer, x, some),
                "numpy": lambda: delta.apply(plan, x, some),
                "torch": lambda: delta.apply(plan, tensor_x, some_tensors)}, rounds)
            yield {"call": "Delta.apply", "rows": n, "sites": count, **cell,
                   "overhead_numpy_us": round(cell["numpy"] - cell["c"], 2),
                   "overhead_torch_us": round(cell["torch"] - cell["c"], 2)}
        yield {"call": "Plan.build", "rows": n, "spans": n,
               **median_us({"python": lambda: plan.build(pool, spans)}, rounds)}


def adapters(rounds):
    tensors, config = read_directory(DEMO / "adapters/csource")
    base = sidepath.Geometry.open(DEMO / "base")
    arrays = {name: numpy.frombuffer(ffi.buffer(view.pointer, 4 * view.shape[0] * view.shape[1]),
                                     "<f4").reshape(view.shape) for name, view in tensors.items()}
    # close() of what was opened is part of both.
    yield {"call": "Adapter", "tensors": len(tensors), **median_us({
        "open": lambda: sidepath.Adapter.open(DEMO / "adapters/csource", base).close(),
        "from_tensors": lambda: sidepath.Adapter.from_tensors(arrays, config, base).close()},
        max(1, rounds // INNER))}


def seconds_of(code):
    """A program of its own, timed from inside: the smallest of five."""
    program = "import time; begin = time.process_time()\n%s\nprint(time.process_time() - begin)"
    return min(float(subprocess.run([sys.executable, "-c", program % code], capture_output=True,
                                    text=True, check=True).stdout) for _ in range(5))


def starts():
    yield {"call": "import sidepath", "ms": round(1e3 * seconds_of("import sidepath"), 1),
           "of_it_import_cffi_ms": round(1e3 * seconds_of("import _cffi_backend"), 1)}
    model = transformers.AutoModelForCausalLM.from_pretrained(DEMO / "base", dtype=torch.float32)
    ids = torch.ones(4, 8, dtype=torch.int64)
    names = [None, "csource", "scripture", "sqldoc"]

    def run(**keywords):
        begin = time.process_time()
        model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, pad_token_id=1,
                       max_new_tokens=16, min_new_tokens=16, **keywords)
        return 1e3 * (time.process_time() - begin)

    run()
    bare = statistics.median(run() for _ in range(9))
    begin = time.process_time()
    host = sidepath.transformers.attach(model, slots=4, rank=16)
    attach = time.process_time() - begin
    for name in names[1:]:
        host.load(name, DEMO / "adapters" / name)
    load = time.process_time() - begin - attach
    first = run(adapters=names)
    mixed = statistics.median(run(adapters=names) for _ in range(9))
    hooks = len(host.places.hooked)
    yield {"call": "attach", "hooks": hooks, "attach_ms": round(1e3 * attach, 1),
           "load_three_ms": round(1e3 * load, 1), "first_batch_ms": round(first, 1),
           "batch_ms": round(mixed, 1), "bare_batch_ms": round(bare, 1),
           "us_a_hook": round(1e3 * (mixed - bare) / 16 / hooks, 1)}


def main():
    out, rounds = Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 200
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    cells = []
    for part in deltas(rounds), adapters(rounds), starts():
        for cell in part:
            print(cell, flush=True)
            cells.append(cell)
    out.write_text(json.dumps({
        "bench": "bench_python", "date": time.strftime("%Y-%m-%d"), "rounds": rounds,
        "command": "bench/bench_python.py OUT.json %d" % rounds,
        "machine": {"cpu": next(line.split(":")[1].strip() for line in open("/proc/cpuinfo")
                                if line.startswith("model name"))},
        "versions": {"python": platform.python_version(), "sidepath": sidepath.__version__,
                     "numpy": numpy.__version__, "torch": torch.__version__,
                     "transformers": transformers.__version__},
        "unit": "us of processor time a call, where a name does not end in ms",
        "cells": cells}, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
