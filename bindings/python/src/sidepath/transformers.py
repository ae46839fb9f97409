"""Mixed batches in a stock transformers model.

    host = sidepath.transformers.attach(model, slots=8)
    host.load("sql", "adapters/sql")
    model.generate(**inputs, adapters=["sql", None, "sql"])   # of each sequence; None: the base

Forward hooks on every linear module, on the embedding and on the head add to what the module wrote
what the adapter of the row says. Rows of the base are not touched: their bytes are those of the
bare model in the same batch. For inference: what needs a gradient is refused. What the hooks cannot
serve (experts, routers, embeddings that scale what they gather) they leave out of the geometry, and
an adapter that needs it is refused by name."""

from __future__ import annotations

import contextlib
import os
from typing import Any, Iterator, Optional, Sequence, Union

import torch

from . import errors
from .adapter import Adapter, Geometry, PathLike, Site, peft_parts
from .delta import Delta
from .pool import Device, Image, Layout, Plan, Pool, Threads, Version

ROWS_MIN = 256


def _is_conv1d(module: Any) -> bool:
    """GPT-2's linear module, whose weight is transposed."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def _dimensions(module: Any) -> tuple[int, int]:
    """k_in and n_out of a linear module."""
    rows, columns = module.weight.shape
    return (rows, columns) if _is_conv1d(module) else (columns, rows)


def _unserved(path: str, module: Any, layer: int) -> list[Site]:
    """Router and experts: said, so that an adapter of them is refused for what it is."""
    fused = dict(module.named_parameters(recurse=False))
    wide = fused.get("gate_up_proj")
    if wide is not None and wide.dim() == 3:
        experts, both, hidden = wide.shape
        shapes = {"gate_proj": (hidden, both // 2), "up_proj": (hidden, both // 2),
                  "down_proj": (both // 2, hidden)}
        return [Site("%s.%d.%s" % (path, expert, name), *shape, "expert", layer, expert)
                for expert in range(experts) for name, shape in shapes.items()]
    if path.endswith(".mlp.gate") and "weight" in fused:
        return [Site(path, *_dimensions(module), "router", layer)]
    return []


class _Places:
    """The geometry of a model by its named_modules(), and which of its sites a hook can serve."""

    def __init__(self, model: Any) -> None:
        self.embed, self.head = model.get_input_embeddings(), model.get_output_embeddings()
        self.plain_embed = type(self.embed) is torch.nn.Embedding
        self.hooked: dict[str, tuple[int, str]] = {}
        inside = {id(module) for module in model.get_decoder().modules()}
        sites: list[Site] = []
        for path, module in model.named_modules():
            rows = self._rows(path, module, id(module) in inside)
            if len(rows) == 1 and rows[0].kind in ("linear", "embedding", "head"):
                self.hooked[path] = len(sites), rows[0].kind
            sites += rows
        self.geometry = Geometry(sites)

    def _rows(self, path: str, module: Any, inside: bool) -> list[Site]:
        numbers = [int(word) for word in path.split(".") if word.isdigit()]
        layer = numbers[0] if numbers else -1
        if module is self.head:
            tied = self.plain_embed and self.embed.weight.data_ptr() == self.head.weight.data_ptr()
            return [Site(path, *_dimensions(module), "head", tied=tied)]
        if not inside:
            return []
        if module is self.embed:
            rows, hidden = module.weight.shape
            return [Site(path, rows, hidden, "embedding")] if self.plain_embed else []
        linear = isinstance(module, torch.nn.Linear) or _is_conv1d(module)
        if linear and len(numbers) == 1:
            return [Site(path, *_dimensions(module), layer=layer)]
        return _unserved(path, module, layer)

    def served(self) -> dict[str, Any]:
        """The tables that replaced rows are compared with: those of a model on the CPU."""
        if self.embed.weight.is_cuda:
            return {}
        tables = {"served_head": self.head.weight} if self.head is not None else {}
        return {**tables, "served_embed": self.embed.weight} if self.plain_embed else tables


class Host:
    """A pool of adapters beside one model, and the hooks that apply them; made by attach()."""

    def __init__(self, model: Any, slots: int, rank: int,
                 modules: Union[str, Sequence[str], None], overlay_bytes: int,
                 threads: int, device: Optional[Device]) -> None:
        self.model, self.places = model, _Places(model)
        self.geometry, self._served = self.places.geometry, self.places.served()
        where = self.places.embed.weight.device
        self.device = device or Device("cuda:%d" % (where.index or 0)
                                       if where.type == "cuda" else "cpu")
        self.dtype = str(self.places.embed.weight.dtype)
        self.layout = Layout(self.geometry, rank=rank, dtype=self.dtype, modules=modules,
                             **self._served)
        self.pool = Pool(self.layout, slots, self.device, overlay_bytes=overlay_bytes)
        self.threads = Threads(threads)
        self._delta: Optional[Delta] = None
        self._images: dict[str, Image] = {}
        self._batch: Optional[list[Optional[Version]]] = None
        self._plans: dict[int, Plan] = {}
        self._hooks = [model.get_submodule(path).register_forward_hook(self._hook(path, *site))
                       for path, site in self.places.hooked.items()]
        self._original = model.generate
        model.generate = self._generate

    # ---- adapters -------------------------------------------------------------------------------

    def load(self, name: str, source: Any, config: Any = None, *, adapter: str = "default",
             allow: Sequence[str] = ()) -> str:
        """Checks an adapter against the model and keeps it under a name; a name that is taken means
        this one from the next batch on. `source` is a directory, a PeftModel (of which `adapter` is
        taken as it is now), or a mapping of names to tensors with its `config`. Gives its digest;
        raises Refused."""
        precision = "f32" if self.layout.dtype == "f32" else "bf16"
        options: dict[str, Any] = {"name": name, "precision": precision, "allow": allow,
                                   **self._served}
        if isinstance(source, (str, os.PathLike)):
            opened = Adapter.open(source, self.geometry, **options)
        else:
            tensors, config = ((source, config) if config is not None
                               else peft_parts(source, adapter))
            on_gpu = any(getattr(tensor, "is_cuda", False) for tensor in tensors.values())
            opened = Adapter.from_tensors(tensors, config, self.geometry,
                                          device=self.device if on_gpu else None, **options)
        with opened:
            self._images[name] = self.layout.pack(opened, self.threads)
            return opened.digest

    def unload(self, name: str) -> None:
        """Forgets a name."""
        del self._images[self._known(name)]

    @property
    def adapters(self) -> dict[str, str]:
        """Names and digests of what is loaded."""
        return {name: image.digest for name, image in self._images.items()}

    def _known(self, name: Union[str, PathLike]) -> str:
        """A name that is loaded; a directory that is not yet is loaded under its path."""
        key = os.fspath(name)
        if key not in self._images and os.path.isdir(key):
            self.load(key, key)
        if key not in self._images:
            raise errors.Refused("no-adapter", key, -1, "no adapter of this name is loaded, and it "
                                 "is no directory; loaded: %s"
                                 % (", ".join(self._images) or "none"))
        return key

    # ---- batches --------------------------------------------------------------------------------

    @contextlib.contextmanager
    def batch(self, adapters: Sequence[Union[str, PathLike, None]]) -> Iterator["Host"]:
        """Forward passes inside have these adapters: one for each sequence, in their order. Where a
        pass has k times as many sequences (beams), k in a row share one."""
        if self._batch is not None:
            raise errors.WrongCall("in-a-batch", "adapters", -1, "a batch is in progress: one at a "
                                   "time for each model")
        names = [None if name is None else self._known(name) for name in adapters]
        different = {name for name in names if name is not None}
        if len({self._images[name].digest for name in different}) > self.pool.slots:
            raise errors.WrongCall("too-many-adapters", "adapters", -1, "%d different adapters in "
                                   "one batch, %d slots: attach with more"
                                   % (len(different), self.pool.slots))
        held: dict[str, Version] = {}
        try:
            for name in sorted(different):
                held[name] = self._hold(self._images[name])
            self._batch = [None if name is None else held[name] for name in names]
            yield self
        finally:
            self._batch, self._plans = None, {}
            for version in held.values():
                version.close()

    def _hold(self, image: Image) -> Version:
        return self.pool.find(image.digest) or self.pool.load(image)

    def _generate(self, *arguments: Any, adapters: Optional[Sequence[Any]] = None,
                  **keywords: Any) -> Any:
        """model.generate with `adapters`: one for each sequence, None for the base."""
        if adapters is None:
            return self._original(*arguments, **keywords)
        inputs = arguments[0] if arguments else keywords.get("input_ids", keywords.get("inputs"))
        if inputs is not None and len(inputs) != len(adapters):
            raise errors.WrongCall("bad-shape", "adapters", -1, "%d adapters for %d sequences"
                                   % (len(adapters), len(inputs)))
        with self.batch(adapters):
            return self._original(*arguments, **keywords)

    def _plan(self, rows: int, sequences: int, path: str) -> Plan:
        """The plan of a pass of so many rows; the head may run on fewer rows than the layers."""
        batch = self._batch or []
        if sequences % len(batch):
            raise errors.WrongCall("bad-shape", path, -1, "%d sequences for %d adapters: a batch "
                                   "has one for each sequence" % (sequences, len(batch)))
        if rows not in self._plans:
            each = rows // len(batch)
            self._plans[rows] = Plan(rows, self.pool.slots).build(
                self.pool, [(version, each) for version in batch])
        return self._plans[rows]

    def _delta_for(self, rows: int) -> Delta:
        """Scratch for so many rows: it grows, and never shrinks."""
        if self._delta is None or self._delta.rows_max < rows:
            size = ROWS_MIN
            while size < rows:
                size *= 2
            self._delta = Delta(self.pool, size, threads=self.threads)
        return self._delta

    def _hook(self, path: str, number: int, kind: str) -> Any:
        def hook(_: Any, arguments: Any, output: Any) -> Any:
            if not self._batch or all(version is None for version in self._batch):
                return None
            if output.requires_grad:
                raise errors.WrongCall("needs-gradient", path, -1, "adapters are applied without "
                                       "gradients: use torch.no_grad()")
            columns = output.shape[-1]
            y = output.reshape(-1, columns)  # a view, where the output is dense
            x = arguments[0].reshape(len(y), -1)
            self._apply(self._plan(len(y), len(output), path), number, kind, x if x.stride(-1) == 1
                        else x.contiguous(), y)
            return y.view(output.shape)
        return hook

    def _apply(self, plan: Plan, number: int, kind: str, x: Any, y: Any) -> None:
        """What the plan's adapters add at one site to y [rows, n_out], from x [rows, k_in]."""
        delta = self._delta_for(plan.n_rows)
        if kind == "linear":
            delta.apply(plan, x, {number: y})
        elif not delta.has_tokens(kind):
            return
        elif kind == "head":
            delta.head(plan, x, y)
        else:
            delta.embed(plan, x.reshape(-1).int(), y)

    # ---- end ------------------------------------------------------------------------------------

    def close(self) -> None:
        """Takes the hooks off; the model is as it was. Twice is harmless."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self.model.__dict__.pop("generate", None)
        self._images.clear()
        for thing in (self._delta, self.pool, self.layout, self.threads, self.geometry):
            if thing is not None:
                thing.close()

    def __enter__(self) -> "Host":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


def attach(model: Any, slots: int = 8, *, rank: int = 64,
           modules: Union[str, Sequence[str], None] = None, overlay_bytes: int = 0,
           threads: int = 1, device: Optional[Device] = None) -> Host:
    """Makes a pool of `slots` adapters beside a transformers model, where its weights are, and
    hooks the model. A slot has room for pairs of `rank` at the `modules` (names such as
    "q_proj,v_proj,lm_head"; None: every linear module of the decoder), in the type of the model's
    weights. `overlay_bytes` is the budget for rows of embedding and head that adapters replace.
    `threads`: the calling one and, above 1, threads of the library's own, for models on the CPU; 0:
    as many as the process may use."""
    return Host(model, slots, rank, modules, overlay_bytes, threads, device)
