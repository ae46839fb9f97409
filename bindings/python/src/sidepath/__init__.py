"""Sidepath: many LoRA adapters over one base model.

    sidepath.inspect(dir, base)               what an adapter holds, or Refused
    sidepath.Adapter, sidepath.Geometry       adapters from files and from memory, checked
    sidepath.Pool, Plan, Delta                their deltas on numpy arrays and torch tensors
    sidepath.transformers.attach(model)       mixed batches in a stock transformers model
    sidepath.Engine                           the serving engine in this process
    sidepath.Client                           adapters published to a server over HTTP

docs/PYTHON.md has the whole. Importing needs cffi and nothing else."""

from __future__ import annotations

import importlib

from ._library import library_version
from .adapter import (Adapter, AdapterSite, Factor, Geometry, Receipt, Site, inspect)
from .arrays import bfloat16
from .client import Client
from .delta import Delta
from .engine import Completion, Engine, Loaded, Scores
from .errors import Closed, DeviceFailed, NotYet, Refused, Short, SidepathError, WrongCall
from .pool import Device, Image, Layout, Plan, Pool, Stream, Threads, Version

__version__ = library_version()
__all__ = ["Adapter", "AdapterSite", "Client", "Closed", "Completion", "Delta", "Device",
           "DeviceFailed", "Engine", "Factor", "Geometry", "Image", "Layout", "Loaded", "NotYet",
           "Plan", "Pool", "Receipt", "Refused", "Scores", "Short", "SidepathError", "Site",
           "Stream", "Threads", "Version", "WrongCall", "bfloat16", "inspect", "library_version"]


def __getattr__(name: str) -> object:
    """sidepath.transformers and sidepath.vllm are imported when they are first asked for."""
    if name in ("transformers", "vllm"):
        return importlib.import_module("." + name, __name__)
    raise AttributeError("module %r has no attribute %r" % (__name__, name))
