"""A LoRA resolver for vLLM that refuses what vLLM would drop in silence.

vLLM asks its resolvers for adapters that it does not know. This one looks for a folder of the
adapter's name, checks it against the base model as the engine here does, and gives it to vLLM only
where nothing of it would be left out: what vLLM's loader skips (rows of embedding or head that were
trained whole, biases, magnitudes, tensors of modules that the base lacks) is a refusal with the
tensor's name in vLLM's log, instead of other answers.

    pip install sidepath                        # beside vLLM, in its environment
    VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 VLLM_PLUGINS=sidepath \\
        SIDEPATH_VLLM_ADAPTERS=/adapters SIDEPATH_VLLM_BASE=/models/base vllm serve /models/base ...

Importing this file imports nothing of vLLM; register(), which vLLM calls, imports its resolver's
interface and its request, neither of which has kernels."""

from __future__ import annotations

import os
import zlib
from pathlib import Path
from typing import Any, Optional

from . import errors
from .adapter import Adapter, PathLike, Receipt

ADAPTERS_VARIABLE, BASE_VARIABLE = "SIDEPATH_VLLM_ADAPTERS", "SIDEPATH_VLLM_BASE"
NAME = "sidepath"


def check(folder: PathLike, base: PathLike) -> Receipt:
    """The receipt of an adapter that is pairs and nothing else, each of them with a place in the
    base; else Refused. Of other tensors vLLM says nothing, and of pairs it applies what it knows or
    refuses them itself."""
    with Adapter.open(folder, base) as adapter:
        receipt = adapter.receipt()
        for table in adapter.tables:
            raise errors.Refused("vllm-drops-rows", table, -1, "the adapter replaces rows of %s, "
                                 "which vLLM does not apply" % table)
        for row in receipt.ignored:
            raise errors.Refused("vllm-drops-tensor", row.get("tensor", ""), -1, "the adapter has "
                                 "a tensor that would be left out: %s" % row.get("reason", ""))
        return receipt


def find(folder: PathLike, name: str) -> Optional[Path]:
    """The folder of an adapter by its name: one below `folder`, wherever links lead; None."""
    root = Path(folder).resolve()
    place = (root / name).resolve()
    inside = root in place.parents and (place / "adapter_config.json").is_file()
    return place if inside else None


def adapter_number(digest: str) -> int:
    """vLLM's number of an adapter, above 0 and the same in every process: of the content, so that a
    replaced adapter is another one to vLLM's caches."""
    return (zlib.crc32(bytes.fromhex(digest)) & 0x7fffffff) or 1


def register() -> None:
    """vLLM's entry point (group vllm.general_plugins); without the two variables it does
    nothing."""
    folder, base = os.environ.get(ADAPTERS_VARIABLE), os.environ.get(BASE_VARIABLE)
    if not folder and not base:
        return
    for name, value in ((ADAPTERS_VARIABLE, folder), (BASE_VARIABLE, base)):
        if not value or not Path(value).is_dir():
            raise errors.WrongCall("bad-setting", name, -1, "%s must name a directory, not %r"
                                   % (name, value))
    from vllm.lora.resolver import LoRAResolverRegistry

    LoRAResolverRegistry.register_resolver(NAME, make_resolver(str(folder), str(base)))


def make_resolver(folder: str, base: str) -> Any:
    """The resolver, as vLLM's interface wants it."""
    from vllm.lora.request import LoRARequest
    from vllm.lora.resolver import LoRAResolver

    class Resolver(LoRAResolver):  # type: ignore[misc]
        """Adapters of one folder, checked against one base."""

        async def resolve_lora(self, base_model_name: str, lora_name: str) -> Any:
            """A request for the adapter, or None where there is no such folder; Refused for one
            that vLLM would not apply as a whole."""
            del base_model_name  # it may be an alias: the base is the one that was configured
            place = find(folder, lora_name)
            if place is None:
                return None
            receipt = check(place, base)
            return LoRARequest(lora_name=lora_name, lora_path=str(place),
                               lora_int_id=adapter_number(str(receipt.digest)))

    return Resolver()
