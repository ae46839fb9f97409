#!/usr/bin/env python3
"""Reads the #include lines of src/ and include/ and checks the way through the rooms:

    cli -> server -> chat -> engine -> grammar -> delta -> route -> stage -> pool -> peer
        -> adapter -> checkpoint -> kernels -> device -> base

A room may include headers of its own and of rooms to its right, never to its left. A room with
folders has an order of them too (FOLDERS): a file includes headers of its own folder and of those
to its right; what lies in the room itself comes first and may include all. The engine reaches
adapter, pool, stage, route and delta by their public headers only. CUDA headers stay in
src/kernels/cuda and src/device/cuda. --self-test proves that each rule can fail.
"""

import re
import sys
import tempfile
from pathlib import Path

ROOMS = ["cli", "server", "chat", "engine", "grammar", "delta", "route", "stage", "pool",
         "peer", "adapter", "checkpoint", "kernels", "device", "base"]
# The folders of a room, each with the folders whose headers it may include beside its own.
FOLDERS = {
    "engine": {"request": ["sampling"], "schedule": ["sampling", "tokenizer"],
               "model": ["ops"], "ops": ["sampling"], "sampling": ["tokenizer"],
               "tokenizer": []},
    "chat": {"jinja": []},
    "server": {"api": ["driver", "metrics", "http"], "driver": ["metrics", "http"],
               "metrics": ["http"], "http": []},
    "kernels": {"cpu": [], "cuda": []},
    "device": {"cuda": []},
}
# Headers that lie in a room with folders, and what all of its folders may know.
OPEN_HEADERS = {"kernels/element.h", "kernels/effective_scale.h", "kernels/scalar_math.h",
                "device/device_cuda.h", "server/server.h"}
# Public headers whose name is not their room's.
PUBLIC_ROOM = {"status": "base", "version": "base", "allocator": "base",
               "intake": "adapter", "overlay": "pool", "grouped": "delta",
               "delta_pieces": "delta", "source": "stage", "partial": "delta",
               "experts": "delta", "moe_rows": "route"}
ENGINE_BY_PUBLIC_HEADERS = {"delta", "route", "stage", "pool", "adapter"}
CUDA_FOLDERS = ("src/kernels/cuda/", "src/device/cuda/")
SUFFIXES = {".c", ".h", ".cu", ".cuh", ".inc"}
INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*(?:"([^"]+)"|<([^>]+)>)', re.MULTILINE)
CUDA_HEADER = re.compile(r"^(cuda|cublas|cudnn|nccl|cooperative_groups|mma\.h|nvtx)")


def room_of_public(name):
    """The room of <sidepath/NAME.h>, or None."""
    stem = name[len("sidepath/"):].removesuffix(".h")
    room = PUBLIC_ROOM.get(stem, stem)
    return room if room in ROOMS else None


def folder_of(path):
    """The folder of a path in a room ("pool/a.c": "", "server/http/b.c": "http")."""
    return "/".join(path.split("/")[1:-1])


def check_folder(path, room, quoted):
    """What is wrong with an include between two folders of one room, or None."""
    own, other = folder_of(path[len("src/"):]), folder_of(quoted)
    if own == "" or own == other or quoted in OPEN_HEADERS:
        return None
    if other in FOLDERS[room].get(own, []):
        return None
    return "%s/%s includes %s, which it must not know" % (room, own, quoted)


def check_include(root, path, room, quoted, angled):
    """What is wrong with one include line of a file in `room`, or None."""
    target, public = None, False
    if angled and angled.startswith("sidepath/"):
        target, public = room_of_public(angled), True
        if target is None:
            return "<%s> belongs to no room" % angled
        if not (root / "include" / angled).is_file():
            return "<%s> does not exist" % angled
    elif angled:
        if CUDA_HEADER.match(angled) and not path.startswith(CUDA_FOLDERS):
            return "<%s> outside %s" % (angled, " and ".join(CUDA_FOLDERS))
        return None
    else:
        target = quoted.split("/")[0]
        if target not in ROOMS or ".." in quoted:
            return '"%s" does not start with a room ("base/error.h")' % quoted
        if not (root / "src" / quoted).is_file():
            return '"%s" does not exist' % quoted
    if quoted and target == room and room in FOLDERS:
        problem = check_folder(path, room, quoted)
        if problem:
            return problem
    if ROOMS.index(target) < ROOMS.index(room):
        return "%s includes %s, a room to its left" % (room, quoted or angled)
    if path.startswith("include/") and not public:
        return 'a public header includes the internal "%s"' % quoted
    if room == "engine" and not public and target in ENGINE_BY_PUBLIC_HEADERS:
        return 'the engine includes the internal "%s"' % quoted
    return None


def room_of_file(root, file):
    relative = file.relative_to(root)
    if relative.parts[0] == "include":
        return room_of_public("/".join(relative.parts[1:]))
    return relative.parts[1] if len(relative.parts) > 2 and relative.parts[1] in ROOMS else None


def check_tree(root):
    """(problems, number of include lines read)"""
    problems, count = [], 0
    for top in ("include", "src"):
        for file in sorted((root / top).rglob("*")):
            if file.suffix not in SUFFIXES or not file.is_file():
                continue
            path = file.relative_to(root).as_posix()
            room = room_of_file(root, file)
            if room is None:
                problems.append("%s: lies in no room" % path)
                continue
            for match in INCLUDE.finditer(file.read_text(encoding="utf-8")):
                count += 1
                problem = check_include(root, path, room, *match.groups())
                if problem:
                    problems.append("%s: %s" % (path, problem))
    return problems, count


SELF_TEST_FILES = {
    "include/sidepath/status.h": "", "include/sidepath/pool.h": "#include <sidepath/status.h>\n",
    "src/base/error.h": "#include <sidepath/status.h>\n", "src/pool/layout.h": "",
    "src/engine/step.h": "", "src/kernels/cpu/gemm.h": "", "src/kernels/element.h": "",
    "src/server/http/http.h": "", "src/server/api/api.h": "", "src/server/server.h": "",
}
SELF_TEST_GOOD = {
    "src/pool/a.c": '#include "pool/layout.h"\n#include "base/error.h"\n#include <stdio.h>\n',
    "src/engine/b.c": '#include <sidepath/pool.h>\n#include "kernels/cpu/gemm.h"\n',
    "src/cli/c.c": '#include "engine/step.h"\n#include "pool/layout.h"\n',
    "src/device/cuda/d.cu": "#include <cuda_runtime.h>\n",
    "src/server/api/e.c": '#include "server/http/http.h"\n#include "server/api/api.h"\n',
    "src/server/f.c": '#include "server/api/api.h"\n',
    "src/kernels/cpu/g.c": '#include "kernels/element.h"\n',
}
SELF_TEST_BAD = {
    "src/base/a.c": ('#include "pool/layout.h"\n', "a room to its left"),
    "src/base/b.c": ("# include <sidepath/pool.h>\n", "a room to its left"),
    "src/kernels/c.c": ('\t#include "engine/step.h"\n', "a room to its left"),
    "src/engine/d.c": ('#include "pool/layout.h"\n', "the engine includes the internal"),
    "src/pool/e.c": ('#include "layout.h"\n', "does not start with a room"),
    "src/pool/f.c": ('#include "pool/../base/error.h"\n', "does not start with a room"),
    "src/pool/g.c": ('#include "pool/nothing.h"\n', "does not exist"),
    "src/pool/h.c": ("#include <sidepath/nothing.h>\n", "belongs to no room"),
    "src/pool/i.c": ("#include <cuda_runtime.h>\n", "outside src/kernels/cuda/"),
    "src/attic/j.c": ("", "lies in no room"),
    "src/server/http/k.c": ('#include "server/api/api.h"\n', "which it must not know"),
    "src/kernels/cuda/l.c": ('#include "kernels/cpu/gemm.h"\n', "which it must not know"),
    "include/sidepath/device.h": ('#include "base/error.h"\n', "a public header includes"),
}


def self_test():
    def build(root, files):
        for name, text in files.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(text)

    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        build(root, SELF_TEST_FILES)
        build(root, SELF_TEST_GOOD)
        problems, count = check_tree(root)
        assert not problems and count == 14, (problems, count)
        for name, (text, want) in SELF_TEST_BAD.items():
            build(root, {name: text})
            problems, _ = check_tree(root)
            assert len(problems) == 1 and want in problems[0], (name, problems)
            assert problems[0].startswith(name), problems
            (root / name).unlink()
    print("check_layers: %d ways to break the rules are found" % len(SELF_TEST_BAD))


def main():
    if sys.argv[1:] == ["--self-test"]:
        self_test()
        return 0
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parents[2]
    problems, count = check_tree(root)
    for problem in problems:
        print(problem, file=sys.stderr)
    if count == 0:
        print("no include line was found under %s" % root, file=sys.stderr)
        return 1
    print("check_layers: %d include lines, %d problems" % (count, len(problems)))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
