"""Adapters in slots of a pool, and the plan that says which row has which of them.

    layout = sidepath.Layout(geometry, rank=16, dtype="bf16")
    pool = sidepath.Pool(layout, slots=8)
    version = pool.load(adapter)                    # holds the slot until it is closed
    plan = sidepath.Plan(rows_max=4096, slots_max=8)
    plan.build(pool, [(version, 12), (None, 5)])    # 12 rows of the adapter, 5 of the base

A pool belongs to one thread at a time. Its calls take a lock, so that a version that is dropped by
Python on another thread, in the middle of a call, is given back after it."""

from __future__ import annotations

import collections
import os
import sys
import threading
from typing import Any, Iterable, Optional, Sequence, Union

from . import arrays, errors
from ._library import NULL, Handle, c_text, call, encode, ffi, lib, made, struct, text
from .adapter import Adapter, Geometry, _served, digest_text


class Device(Handle):
    """Where memory is: "cpu", "cuda" (GPU number 0) or "cuda:N". `library` is the path of the CUDA
    side, a shared object of its own; without it it is looked for beside the library."""

    def __init__(self, name: str = "cpu", *, library: Optional[str] = None) -> None:
        kept = c_text(library, "library")
        options = struct("sp_device_options", library=kept)
        self._own(made("sp_device", lib.sp_device_open, encode(name, "device"), options),
                  lib.sp_device_close)
        self.name: str = text(lib.sp_device_name(self._pointer))
        self.is_gpu: bool = lib.sp_device_get_kind(self._pointer) == lib.SP_DEVICE_CUDA
        self.index: int = int(self.name.partition(":")[2] or 0)
        self._streams: dict[int, "Stream"] = {}

    def stream(self, native: Any) -> "Stream":
        """The host's own stream for calls that take one: a number (a cudaStream_t), or an object
        with `cuda_stream`, as torch's have. One Stream is kept for each number."""
        number = int(getattr(native, "cuda_stream", native))
        if number not in self._streams:
            self._streams[number] = Stream(self, number)
        return self._streams[number]

    def current_stream(self) -> Any:
        """torch's current stream on this device, where torch is loaded; else the main one."""
        torch = sys.modules.get("torch") if self.is_gpu else None
        return NULL if torch is None else self.stream(
            torch.cuda.current_stream(self.index))._pointer

    def close(self) -> None:
        for stream in getattr(self, "_streams", {}).values():
            stream.close()
        super().close()


class Stream(Handle):
    """A stream of the host, wrapped; it stays the host's."""

    def __init__(self, device: Device, native: int) -> None:
        pointer = ffi.cast("void *", native)
        self._own(made("sp_stream", lib.sp_stream_wrap, device._pointer, pointer),
                  lib.sp_stream_destroy, device)
        self.native = native


class Threads(Handle):
    """The library's own threads, for deltas on the CPU; 0: as many as the process may use."""

    def __init__(self, threads: int = 0) -> None:
        self._own(made("sp_exec", lib.sp_exec_create, struct("sp_exec_options", threads=threads)),
                  lib.sp_exec_destroy)


class Layout(Handle):
    """What a slot holds: modules, rank, element type. `modules` None: every linear module; else
    names, as in "q_proj,v_proj". `expert_rank` is the largest rank of pairs of routers and experts;
    0: adapters that have them are refused. Served tables are needed by adapters that replace rows
    of the embedding or the head."""

    def __init__(self, geometry: Geometry, *, rank: int = 16, dtype: Any = "bf16",
                 modules: Union[str, Sequence[str], None] = None, expert_rank: int = 0,
                 served_embed: Any = None, served_head: Any = None) -> None:
        tables = [_served(served_embed, "served_embed"), _served(served_head, "served_head")]
        options = struct("sp_layout_options", geometry=geometry._pointer, rank=rank,
                         modules=geometry._module_set(modules), dtype=arrays.dtype_number(dtype),
                         expert_rank=expert_rank,
                         served_embed=tables[0][0], served_head=tables[1][0])
        self.geometry = Geometry._retain(geometry._pointer)
        self._tables = tables  # their data is borrowed as long as the layout lives
        self._own(made("sp_layout", lib.sp_layout_create, options), lib.sp_layout_release)
        self.slot_bytes: int = lib.sp_layout_slot_bytes(self._pointer)
        self.dtype: str = arrays.NAMES[lib.sp_layout_dtype(self._pointer)]
        self.rank: int = lib.sp_layout_rank_stride(self._pointer)

    @property
    def modules(self) -> list[str]:
        """The names of the modules that a slot holds."""
        return self.geometry._module_names(lib.sp_layout_modules(self._pointer))

    def pack(self, adapter: Adapter, threads: Optional[Threads] = None) -> "Image":
        """The adapter as the bytes of a slot. Raises Refused for what the layout cannot hold."""
        return Image(self, adapter, threads)


class Image(Handle):
    """An adapter's packed bytes, for pools of one layout."""

    def __init__(self, layout: Layout, adapter: Adapter, threads: Optional[Threads]) -> None:
        pointer = made("sp_image", lib.sp_layout_pack, layout._pointer, adapter._pointer,
                       threads._pointer if threads else NULL)
        self._own(pointer, lib.sp_image_destroy, layout)

    @property
    def digest(self) -> str:
        return digest_text(lib.sp_image_digest(self._pointer))

    @property
    def checksum(self) -> int:
        """XXH3 of the slot's bytes: finds accidents, proves nothing."""
        return int(lib.sp_image_checksum(self._pointer))

    @property
    def overlay_bytes(self) -> int:
        """What its replaced rows take of a pool's overlay_bytes."""
        return int(lib.sp_image_overlay_bytes(self._pointer))

    @property
    def expert_bytes(self) -> int:
        """What its pairs of routers and experts take of a pool's expert_bytes."""
        return int(lib.sp_image_expert_bytes(self._pointer))


class _Turns:
    """One call at a time in a pool; what was dropped meanwhile is given back at the next one."""

    def __init__(self, pool: Any) -> None:
        self._pool, self._lock = pool, threading.RLock()
        self._late: collections.deque[Any] = collections.deque()
        self._process = os.getpid()

    def __enter__(self) -> None:
        if self._process != os.getpid():  # the child of a fork: whoever had the lock is not there
            self._lock, self._process = threading.RLock(), os.getpid()
        self._lock.acquire()
        while self._late:
            self._release(self._late.popleft())

    def __exit__(self, *_: Any) -> None:
        self._lock.release()

    def _release(self, handle: Any) -> None:
        lib.sp_pool_release(self._pool, handle[0], NULL)

    def give_back(self, handle: Any) -> None:
        """The destroyer of a version: never waits, on whatever thread Python lets go of it."""
        if self._lock.acquire(blocking=False):
            self._release(handle)
            self._lock.release()
        else:
            self._late.append(handle)

    def destroy(self, pool: Any) -> None:
        with self:
            lib.sp_pool_destroy(pool)


class Version(Handle):
    """One adapter in a slot, held: no load takes the slot until this is closed."""

    def __init__(self, pool: "Pool", handle: Any, digest: str) -> None:
        self.pool, self.digest = pool, digest
        self.slot: int = handle.slot
        self._own(handle, pool._turns.give_back, pool)

    def share(self) -> "Version":
        """Another hold on the same version, for another request."""
        with self.pool._turns:
            call(lib.sp_pool_acquire, self.pool._pointer, self._pointer[0])
            handle = ffi.new("sp_slot_handle *", self._pointer[0])
        return Version(self.pool, handle, self.digest)

    def __repr__(self) -> str:
        return "Version(slot %d, %s)" % (self.slot, self.digest)


class Pool(Handle):
    """Slots of one layout at fixed addresses, on a device. `overlay_bytes` is the budget of all
    slots for rows of embedding and head that adapters replace, `expert_bytes` that for pairs of
    routers and experts; 0: such adapters are refused."""

    def __init__(self, layout: Layout, slots: int = 8, device: Optional[Device] = None, *,
                 overlay_bytes: int = 0, expert_bytes: int = 0) -> None:
        self.layout, self.slots = layout, slots
        self.device = device if device is not None else Device("cpu")
        pointer = made("sp_pool", lib.sp_pool_create, struct(
            "sp_pool_options", layout=layout._pointer, device=self.device._pointer, slots=slots,
            overlay_bytes=overlay_bytes, expert_bytes=expert_bytes))
        self._turns = _Turns(pointer)
        self._own(pointer, self._turns.destroy, layout, self.device)

    def load(self, adapter: Union[Adapter, Image]) -> Version:
        """Into a free slot, or one that nobody holds and that was used the longest time ago. What
        is in a slot already is found there by its content. Raises NotYet (SP_POOL_FULL) while every
        slot is held: close a version and try again."""
        if isinstance(adapter, Image):
            return self._load(adapter)
        found = self.find(adapter.digest)
        if found is not None:
            return found
        with self.layout.pack(adapter) as image:
            return self._load(image)

    def _load(self, image: Image) -> Version:
        handle = ffi.new("sp_slot_handle *")
        with self._turns:
            call(lib.sp_pool_load, self._pointer, image._pointer, handle)
            return Version(self, handle, image.digest)

    def find(self, digest: str) -> Optional[Version]:
        """A hold on the version with this content; None: it is in no slot."""
        content = ffi.new("sp_digest *")
        content.bytes = bytes.fromhex(digest)
        handle = ffi.new("sp_slot_handle *")
        with self._turns:
            if lib.sp_pool_find(self._pointer, content, handle, NULL) != 0:
                return None
            call(lib.sp_pool_acquire, self._pointer, handle[0])
            return Version(self, handle, digest)

    def references(self, slot: int) -> int:
        """How many hold what is in the slot."""
        info = struct("sp_slot_info")
        with self._turns:
            call(lib.sp_pool_slot_info, self._pointer, slot, info)
        return int(info.references)

    def read(self, version: Version) -> bytes:
        """The bytes of a version's slot, copied to the host: what the kernels read."""
        layout, begin = self.layout, None
        for index in range(lib.sp_layout_n_sites(layout._pointer)):
            site = lib.sp_layout_site_at(layout._pointer, index)
            if site.apart:
                continue  # a router, which is in the experts' memory
            tables = lib.sp_pool_tables_at(self._pointer, index)
            first = int(ffi.cast("uintptr_t", tables.first_a)) - site.a_offset_bytes
            begin = first if begin is None else min(first, begin)
        if begin is None:
            return b""
        out = bytearray(layout.slot_bytes)
        source = ffi.cast("void *", begin + version._pointer.slot * layout.slot_bytes)
        with self._turns:
            call(lib.sp_device_read, self.device._pointer, ffi.from_buffer(out), source, len(out))
        return bytes(out)


Span = Union[tuple[Optional[Version], int], tuple[Optional[Version], int, float]]


class Plan(Handle):
    """Which row of a step has which version. Rebuilt before every step that has other rows; until
    then it keeps its versions, unless they are closed."""

    def __init__(self, rows_max: int, slots_max: int) -> None:
        self.rows_max, self.n_rows, self.builds = rows_max, 0, 0
        self._own(made("sp_plan", lib.sp_plan_create, rows_max, slots_max), lib.sp_plan_destroy)
        self._pool: Optional[Pool] = None
        self._versions: list[Optional[Version]] = []  # held until the next build

    def build(self, pool: Pool, spans: Iterable[Span], padded_rows: int = 0) -> "Plan":
        """Runs of rows in their order: (version or None for the base, rows) and, where it is not 1,
        the request's scale, 0 to 16, 0 being the base. On any refusal the plan is as it was."""
        rows = list(spans)
        table = ffi.new("sp_route_span[]", len(rows))
        total = 0
        for row, span in zip(table, rows):
            version = span[0]
            row.struct_bytes, row.n_rows = ffi.sizeof("sp_route_span"), span[1]
            row.scale = span[2] if len(span) > 2 else 1.0
            row.handle.slot = -1
            if version is not None:
                row.handle = version._pointer[0]
            total += span[1]
        with pool._turns:
            call(lib.sp_plan_build, self._pointer, pool._pointer, table, len(rows), padded_rows)
        return self._built(pool, max(total, padded_rows), [span[0] for span in rows])

    def select(self, source: "Plan", rows: Sequence[int]) -> "Plan":
        """The plan of some rows of another one: for a head that runs on fewer rows."""
        numbers = ffi.new("int32_t[]", list(rows))
        if source._pool is None:
            raise errors.WrongCall("plan-of-another-pool", "source", -1, "it was never built")
        with source._pool._turns:
            call(lib.sp_plan_select, self._pointer, source._pointer, numbers, len(rows))
        return self._built(source._pool, len(rows), source._versions)

    def _built(self, pool: Pool, n_rows: int, versions: list[Optional[Version]]) -> "Plan":
        self._pool, self.n_rows, self._versions = pool, n_rows, versions
        self.builds += 1
        return self
