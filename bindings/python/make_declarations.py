#!/usr/bin/env python3
"""Writes the module that tells cffi what the public headers declare, so that nothing of them is
written a second time. The headers go through the compiler's preprocessor as they are, and cffi
reads the result; the module is pure Python and needs neither a compiler nor pycparser to import.
    make_declarations.py CC INCLUDE_FOLDER OUT.py"""

import contextlib
import io
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import cffi

# What https://dmlc.github.io/dlpack describes: how arrays of other packages come in and go out.
DLPACK = """
typedef struct { int32_t device_type, device_id; } dl_device;
typedef struct { uint8_t code, bits; uint16_t lanes; } dl_type;
typedef struct {
    void *data;
    dl_device device;
    int32_t n_dims;
    dl_type type;
    int64_t *shape, *strides;
    uint64_t byte_offset;
} dl_tensor;
typedef struct { dl_tensor tensor; void *manager; void *deleter; } dl_managed_tensor;
"""


def preprocess(compiler, include):
    """The declarations of all public headers, without those of the C library, which cffi knows."""
    names = sorted(path.name for path in (include / "sidepath").glob("*.h"))
    with tempfile.TemporaryDirectory() as folder:
        for name in ("stdbool.h", "stddef.h", "stdint.h"):
            (Path(folder) / name).write_text("")
        source = "".join("#include <sidepath/%s>\n" % name for name in names)
        return subprocess.run(
            [compiler, "-E", "-P", "-nostdinc", "-I", folder, "-I", str(include), "-DSP_API=",
             "-x", "c", "-"], input=source, capture_output=True, text=True, check=True).stdout


def version_of(include):
    text = (include / "sidepath/version.h").read_text()
    major, minor, patch = (int(re.search(r"SP_VERSION_%s (\d+)" % part, text).group(1))
                           for part in ("MAJOR", "MINOR", "PATCH"))
    return major * 10000 + minor * 100 + patch


def write(compiler, include, out):
    builder = cffi.FFI()
    builder.cdef(preprocess(compiler, include) + DLPACK)
    builder.set_source(out.stem, None)
    with contextlib.redirect_stdout(io.StringIO()):  # cffi says what it writes
        builder.emit_python_code(str(out))
    with out.open("a") as file:
        file.write("VERSION = %d\n" % version_of(include))


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    write(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
