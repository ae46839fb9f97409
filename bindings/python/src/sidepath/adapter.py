"""Geometry, adapters and receipts: what a base model can be adapted at, and what an adapter is.

    receipt = sidepath.inspect("adapters/sql", "models/base")
    adapter = sidepath.Adapter.open("adapters/sql", base="models/base")
    adapter = sidepath.Adapter.from_tensors(state_dict, config, base="models/base")
"""

from __future__ import annotations

import enum
import json
import os
import sys
from pathlib import Path
from typing import Any, Iterable, Iterator, Mapping, NamedTuple, Optional, Sequence, Union

from . import arrays, errors
from ._library import (NULL, Handle, c_text, call, encode, ffi, lib, made, struct, text)

PathLike = Union[str, "os.PathLike[str]"]
KINDS = ("linear", "embedding", "head", "router", "expert")
RANK_MAX = 4096


class Site(NamedTuple):
    """One place that adapters may adapt: sp_site of include/sidepath/adapter.h."""
    path: str  # as named_modules() has it
    k_in: int
    n_out: int
    kind: str = "linear"  # one of KINDS
    layer: int = -1
    expert: int = -1
    group: int = -1  # sites of one layer with the same group share x
    tied: bool = False
    module: Optional[str] = None  # its name in every layer


class Geometry(Handle):
    """Which sites a base model has, and how large they are. Immutable."""

    def __init__(self, sites: Iterable[Site]) -> None:
        """A geometry by hand: for any model. A site's index is its number in all calls."""
        rows = list(sites)
        kept = [(c_text(site.path, "path"), c_text(site.module, "module")) for site in rows]
        table = ffi.new("sp_site[]", len(rows))
        for row, site, (path, module) in zip(table, rows, kept):
            if site.kind not in KINDS:
                raise errors.WrongCall("bad-kind", site.path, -1,
                                       "%r is no kind of a site: %s" % (site.kind, KINDS))
            row.struct_bytes = ffi.sizeof("sp_site")
            row.path, row.module, row.kind = path, module, KINDS.index(site.kind)
            row.layer, row.expert, row.group = site.layer, site.expert, site.group
            row.k_in, row.n_out, row.tied = site.k_in, site.n_out, site.tied
        self._adopt(made("sp_geometry", lib.sp_geometry_create, table, len(rows)))

    def _adopt(self, pointer: Any) -> None:
        self._own(pointer, lib.sp_geometry_release)

    @classmethod
    def open(cls, path: PathLike) -> "Geometry":
        """The geometry of the model in a directory, or of a config.json."""
        self = cls.__new__(cls)
        self._adopt(made("sp_geometry", lib.sp_geometry_open, encode(path, "path")))
        return self

    @classmethod
    def parse(cls, config: Union[str, bytes, Mapping[str, Any]]) -> "Geometry":
        """The same from the text of a config.json, or from what it holds."""
        data = _json_bytes(config)
        self = cls.__new__(cls)
        self._adopt(made("sp_geometry", lib.sp_geometry_parse, data, len(data)))
        return self

    @classmethod
    def _retain(cls, pointer: Any) -> "Geometry":
        """A reference of its own to a geometry that another object has."""
        self = cls.__new__(cls)
        self._adopt(lib.sp_geometry_retain(pointer))
        return self

    def __len__(self) -> int:
        return int(lib.sp_geometry_n_sites(self._pointer))

    def __getitem__(self, site: int) -> Site:
        if not 0 <= site < len(self):
            raise IndexError("the geometry has no site %d" % site)
        row = ffi.new("sp_site *")
        row.struct_bytes = ffi.sizeof("sp_site")
        call(lib.sp_geometry_site_at, self._pointer, site, row)
        return Site(text(row.path), row.k_in, row.n_out, KINDS[row.kind], row.layer, row.expert,
                    row.group, bool(row.tied), text(row.module))

    def __iter__(self) -> Iterator[Site]:
        return (self[site] for site in range(len(self)))

    def find(self, path: str) -> int:
        """The number of the site with this path, under any trunk; -1: there is none."""
        return int(lib.sp_geometry_find(self._pointer, encode(path, "path")))

    @property
    def notes(self) -> list[str]:
        """What reading a config.json found beside what is used."""
        notes, index = [], 0
        while (note := lib.sp_geometry_note(self._pointer, index)) != NULL:
            notes.append(text(note))
            index += 1
        return notes

    def _module_set(self, modules: Union[str, Sequence[str], None]) -> int:
        if modules is None:
            return 0
        names = modules if isinstance(modules, str) else ",".join(modules)
        out = ffi.new("sp_module_set *")
        call(lib.sp_module_set_parse, self._pointer, encode(names, "modules"), out)
        return int(out[0] & lib.sp_geometry_modules(self._pointer))

    def _module_names(self, modules: int) -> list[str]:
        return [text(lib.sp_geometry_module_name(self._pointer, number))
                for number in range(lib.sp_geometry_n_modules(self._pointer))
                if modules >> number & 1]


class Factor:
    """One factor of a pair, as stored: A is [rank, k_in], B [n_out, rank]. It keeps the adapter's
    memory alive. `torch.from_dlpack(factor)` and other readers of DLPack see it without a copy;
    `numpy.asarray(factor)` is a copy in float32, which holds every value of the three types."""

    def __init__(self, factor: Any, adapter: Any) -> None:
        self.dtype: str = arrays.NAMES[factor.dtype]
        self.shape: tuple[int, int] = (factor.rows, factor.cols)
        self._keep = ffi.gc(lib.sp_adapter_retain(adapter), lib.sp_adapter_release)
        self._view = arrays.View(int(ffi.cast("uintptr_t", factor.data)), self.dtype, self.shape,
                                 (factor.row_stride, factor.col_stride), arrays.CPU, 0,
                                 self._keep, False)

    @property
    def view(self) -> arrays.View:
        """Address, type, shape and strides."""
        return self._view

    def __dlpack__(self, **_: Any) -> Any:
        return arrays.to_dlpack(self._view)

    def __dlpack_device__(self) -> tuple[int, int]:
        return arrays.CPU, 0

    def __array__(self, dtype: Any = None, copy: Optional[bool] = None) -> Any:
        import numpy  # only here

        if copy is False:
            raise ValueError("a factor of %s becomes float32 by a copy only" % self.dtype)
        rows, cols = self.shape
        step, size = self._view.strides, arrays.BYTES[self.dtype]
        elements = (rows - 1) * step[0] + (cols - 1) * step[1] + 1
        raw = numpy.frombuffer(ffi.buffer(self._view.pointer, elements * size),
                               {"f32": "<f4", "f16": "<f2", "bf16": "<u2"}[self.dtype])
        shown = numpy.lib.stride_tricks.as_strided(raw, self.shape,
                                                   (step[0] * size, step[1] * size))
        if self.dtype == "bf16":
            shown = (shown.astype("<u4") << 16).view("<f4")
        return numpy.array(shown, dtype or "<f4")

    def __repr__(self) -> str:
        return "Factor(%s, %d x %d)" % (self.dtype, *self.shape)


class AdapterSite(NamedTuple):
    """One site that an adapter adapts: y += scale * (x · aᵀ) · bᵀ."""
    site: int  # its number in the geometry; -1: the adapter was opened without one
    path: str
    module: str
    kind: str
    layer: int
    expert: int
    rank: int
    scale: float
    a: Factor
    b: Factor


class Receipt:
    """What opening an adapter found: verdict, digest, rank and scale of each module, ignored
    tensors with their reasons, notes. `json` is the library's text; str() is a table."""

    def __init__(self, pointer: Any) -> None:
        self.json: str = text(lib.sp_receipt_json(pointer))
        self._table = text(lib.sp_receipt_table(pointer))
        lib.sp_receipt_destroy(pointer)
        self.fields: dict[str, Any] = json.loads(self.json)
        self.verdict: str = self.fields["verdict"]
        self.digest: Optional[str] = self.fields.get("digest")
        self.sites: int = self.fields.get("sites") or 0
        self.modules: dict[str, Any] = self.fields.get("modules") or {}
        self.ignored: list[dict[str, str]] = self.fields.get("ignored") or []
        self.notes: list[str] = self.fields.get("notes") or []

    def __str__(self) -> str:
        return self._table

    def __repr__(self) -> str:
        return "Receipt(%s, %s)" % (self.verdict, self.digest)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Receipt) and self.json == other.json


def _plain(value: Any) -> Any:
    """What JSON lacks and configs of PEFT have."""
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    raise errors.WrongCall("bad-config", "config", -1,
                           "%r in a config is nothing that JSON has" % (value,))


def _json_bytes(config: Any) -> bytes:
    """A config as the bytes of its JSON: text, bytes, a mapping, or an object of PEFT."""
    if isinstance(config, (bytes, bytearray)):
        return bytes(config)
    if isinstance(config, str):
        return config.encode()
    if hasattr(config, "to_dict"):
        config = config.to_dict()
    return json.dumps(config, default=_plain).encode()


def _served(table: Any, what: str) -> Any:
    """A table that the host serves, and its view; NULL for None."""
    if table is None:
        return NULL, None
    lent = arrays.rows_of(table, what)
    if lent.dtype not in arrays.DTYPES or lent.strides[0] != lent.shape[1]:
        raise errors.WrongCall("bad-tensor", what, -1, "%s must be dense, of float32, bfloat16 or "
                               "float16" % what)
    return struct("sp_served_table", data=lent.pointer, dtype=arrays.DTYPES[lent.dtype],
                  rows=lent.shape[0], hidden=lent.shape[1]), lent


class _Options:
    """sp_adapter_options from keywords, with all that they point to."""

    def __init__(self, base: Union[PathLike, Geometry, None], name: Optional[str], precision: Any,
                 rank_max: int, allow: Sequence[str], served_embed: Any, served_head: Any,
                 device: Any) -> None:
        self.geometry = base if isinstance(base, Geometry) or base is None else Geometry.open(base)
        self.texts = [c_text(name, "name"),
                      c_text(base if base is not self.geometry else None, "base")]
        self.tables = [_served(served_embed, "served_embed"), _served(served_head, "served_head")]
        self.struct = struct(
            "sp_adapter_options", name=self.texts[0], base_dir=self.texts[1], rank_max=rank_max,
            geometry=self.geometry._pointer if self.geometry else NULL,
            pool_dtype=arrays.dtype_number(precision, "precision"),
            served_embed=self.tables[0][0], served_head=self.tables[1][0],
            views_on=device._pointer if device is not None else NULL)
        for word in allow:
            if word not in ("partial", "no_effect", "unknown_fields", "base_changing_init"):
                raise errors.WrongCall("bad-allow", "allow", -1, "%r cannot be allowed" % (word,))
            setattr(self.struct, "allow_" + word, True)


class TensorTable:
    """Tensors as the library takes them, with all that the table points to."""

    def __init__(self, tensors: Mapping[str, Any]) -> None:
        self.lent = {key: arrays.view(tensor, key) for key, tensor in tensors.items()}
        _wait_for_torch(self.lent.values())
        self.rows = ffi.new("sp_tensor_view[]", len(self.lent))
        self._keep = []
        for row, (key, view) in zip(self.rows, self.lent.items()):
            if view.dtype not in arrays.TENSOR_TYPES:
                raise errors.Refused("unsupported-dtype", key, -1,
                                     "a tensor of an adapter has a type of integers")
            self._keep.append((c_text(key, "a tensor's name"), ffi.new("int64_t[]", view.shape),
                               ffi.new("int64_t[]", view.strides)))
            row.struct_bytes, row.n_dims = ffi.sizeof("sp_tensor_view"), len(view.shape)
            row.name, row.shape, row.strides = self._keep[-1]
            row.data, row.type = view.pointer, arrays.TENSOR_TYPES[view.dtype]
            row.device_kind, row.device_index = view.device, view.device_index


class Adapter(Handle):
    """One adapter: read, checked against a base model, immutable. Everything that the files or the
    state dict hold is applied, or listed in the receipt as ignored for a reason, or the adapter is
    refused. `base` is the model's directory, or a geometry; without one the files alone are
    checked."""

    @classmethod
    def _make(cls, function: Any, arguments: Sequence[Any], options: _Options) -> "Adapter":
        self = cls.__new__(cls)
        try:
            pointer = made("sp_adapter", function, *arguments, options.struct)
        except errors.SidepathError as refusal:
            if not isinstance(refusal, errors.Refused) and refusal.code:
                raise errors.Refused(*refusal.args) from None
            raise
        self._own(pointer, lib.sp_adapter_release)
        return self

    @classmethod
    def open(cls, path: PathLike, base: Union[PathLike, Geometry, None] = None, *,
             name: Optional[str] = None, precision: Any = "bf16", rank_max: int = 0,
             allow: Sequence[str] = (), served_embed: Any = None,
             served_head: Any = None) -> "Adapter":
        """Reads and checks the adapter in a directory. Raises Refused, which names the tensor or
        field; `allow` may lift "partial", "no_effect", "unknown_fields", "base_changing_init".
        `precision` is the type of the pool that it is for."""
        options = _Options(base, name, precision, rank_max, allow, served_embed, served_head, None)
        return cls._make(lib.sp_adapter_open, [encode(path, "path")], options)

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Any], config: Any,
                     base: Union[PathLike, Geometry, None] = None, *, name: Optional[str] = None,
                     precision: Any = "bf16", rank_max: int = 0, allow: Sequence[str] = (),
                     served_embed: Any = None, served_head: Any = None,
                     device: Any = None) -> "Adapter":
        """The same adapter from memory: `tensors` maps the names that PEFT's files have to arrays
        or tensors, `config` is what adapter_config.json holds (a mapping, its text, or a LoraConfig
        of PEFT). Digest, receipt and packed bytes are those of a directory with the same content.
        All bytes are copied before it returns. Tensors on a GPU need the `device` they are on; the
        work of torch's current stream there is waited for."""
        data = _json_bytes(config)
        table = TensorTable(tensors)
        options = _Options(base, name, precision, rank_max, allow, served_embed, served_head,
                           device)
        return cls._make(lib.sp_adapter_from_tensors,
                         [data, len(data), table.rows, len(table.rows)], options)

    @classmethod
    def from_peft(cls, model: Any, base: Union[PathLike, Geometry, None] = None, *,
                  adapter: str = "default", **keywords: Any) -> "Adapter":
        """The adapter of that name in a PeftModel, as it is now: what save_pretrained would write.
        Further keywords are those of from_tensors."""
        return cls.from_tensors(*peft_parts(model, adapter), base, **keywords)

    @property
    def name(self) -> str:
        return text(lib.sp_adapter_name(self._pointer))

    @property
    def digest(self) -> str:
        """SHA-256 over what is applied, in hexadecimal: the identity of the adapter's content."""
        return digest_text(lib.sp_adapter_digest(self._pointer))

    @property
    def geometry(self) -> Optional[Geometry]:
        """What it was checked against; None: the files alone were."""
        pointer = lib.sp_adapter_geometry(self._pointer)
        return None if pointer == NULL else Geometry._retain(pointer)

    @property
    def rank(self) -> int:
        """The largest of its pairs outside the experts and the router."""
        return int(lib.sp_adapter_rank_max(self._pointer))

    @property
    def sites(self) -> list[AdapterSite]:
        """Its pairs, as arrays; see Factor for how they are read."""
        rows, pointer = [], self._pointer
        for index in range(lib.sp_adapter_n_sites(pointer)):
            site = lib.sp_adapter_site_at(pointer, index)
            rows.append(AdapterSite(
                site.site, text(site.path), text(site.module), KINDS[site.kind], site.layer,
                site.expert, site.rank, site.scale, Factor(site.a, pointer),
                Factor(site.b, pointer)))
        return rows

    @property
    def tables(self) -> list[str]:
        """The modules of which it replaces whole rows."""
        return [text(lib.sp_adapter_table_at(self._pointer, index).module)
                for index in range(lib.sp_adapter_n_tables(self._pointer))]

    def receipt(self, precision: Any = "bf16") -> Receipt:
        """What `sidepath inspect` prints for it: held to the modules that the engine can apply,
        with the bytes that it would take in a slot of its own rank."""
        pointer, dtype = self._pointer, arrays.dtype_number(precision, "precision")
        geometry = lib.sp_adapter_geometry(pointer)
        options = struct("sp_receipt_options")
        if geometry != NULL:
            options.engine_modules = lib.sp_engine_modules(geometry)
            options.expert_bytes = lib.sp_layout_expert_bytes(pointer, dtype)
            options.slot_bytes = self._slot_bytes(geometry, dtype)
        return Receipt(made("sp_receipt", lib.sp_receipt_create, pointer, options))

    def _slot_bytes(self, geometry: Any, dtype: int) -> int:
        linear = (lib.sp_adapter_modules(self._pointer) &
                  lib.sp_geometry_kind_modules(geometry, lib.SP_SITE_LINEAR))
        if not linear:
            return 0
        layout = struct("sp_layout_options", geometry=geometry, modules=linear, rank=self.rank,
                        dtype=dtype)
        slot, matrices = ffi.new("size_t *"), ffi.new("size_t *")
        call(lib.sp_layout_measure, layout, slot, matrices)
        return int(slot[0])

    def __repr__(self) -> str:
        return "Adapter(closed)" if self.closed else "Adapter(%s, %s)" % (self.name, self.digest)


def digest_text(digest: Any) -> str:
    return bytes(ffi.buffer(digest.bytes)).hex()


def _wait_for_torch(lent: Iterable[arrays.View]) -> None:
    """Tensors of torch on a GPU are written by its current stream."""
    torch = sys.modules.get("torch")
    if torch is not None:
        for index in {view.device_index for view in lent if view.device == arrays.CUDA}:
            torch.cuda.current_stream(index).synchronize()


def peft_parts(model: Any, adapter: str = "default") -> tuple[dict[str, Any], dict[str, Any]]:
    """State dict and config of one adapter in a PeftModel, as save_pretrained would write them."""
    import peft  # only here

    configs = getattr(model, "peft_config", None)
    if not configs or adapter not in configs:
        raise errors.WrongCall("no-adapter", adapter, -1, "this model has no adapter %r; it has: %s"
                               % (adapter, ", ".join(configs or ()) or "none"))
    tensors = peft.get_peft_model_state_dict(model, adapter_name=adapter)
    config = configs[adapter].to_dict()
    config["inference_mode"] = True
    return tensors, config


def read_directory(path: PathLike) -> tuple[dict[str, Any], bytes]:
    """Tensors, as views, and config of a folder that PEFT wrote: reads adapter_model.safetensors
    with the standard library alone. For tests and for senders; Adapter.open is the way to use
    one."""
    folder = Path(path)
    data = (folder / "adapter_model.safetensors").read_bytes()
    begin = 8 + int.from_bytes(data[:8], "little")
    memory = ffi.from_buffer(data)
    address = int(ffi.cast("uintptr_t", memory)) + begin
    tensors = {}
    for name, entry in json.loads(data[8:begin]).items():
        if name == "__metadata__":
            continue
        dtype = {"F32": "f32", "BF16": "bf16", "F16": "f16", "I32": "i32"}.get(entry["dtype"])
        if dtype is None:
            raise errors.Refused("unsupported-dtype", name, -1, "a tensor of %s" % entry["dtype"])
        shape = tuple(entry["shape"])
        tensors[name] = arrays.View(address + entry["data_offsets"][0], dtype, shape,
                                    arrays.dense(shape), arrays.CPU, 0, memory, False)
    return tensors, (folder / "adapter_config.json").read_bytes()


def inspect(path: PathLike, base: Union[PathLike, Geometry, None] = None, *,
            precision: Any = "bf16", rank_max: Optional[int] = None,
            allow: Sequence[str] = ()) -> Receipt:
    """The receipt of the adapter in a directory: what `sidepath inspect` prints. With a base (its
    directory) it is checked against it; without one the verdict is "unchecked". Raises Refused,
    whose `code`, `subject` and `position` say why."""
    if rank_max is None:
        rank_max = 0 if base is None else RANK_MAX  # no pool is larger
    with Adapter.open(path, base, precision=precision, rank_max=rank_max, allow=allow) as adapter:
        return adapter.receipt(precision)
