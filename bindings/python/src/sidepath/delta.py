"""The deltas of a step: y += scale * (x · Aᵀ) · Bᵀ, each row with its own adapter.

    delta = sidepath.Delta(pool, rows_max=4096)
    delta.apply(plan, x, {"model.layers.0.self_attn.q_proj": q})    # q is changed in place

x and y are numpy arrays or torch tensors in the memory of the pool's device, row i being row i of
the plan. On a GPU calls only enqueue, on torch's current stream or the one that is given. The bits
of a row depend on its own x, y and adapter and on nothing else."""

from __future__ import annotations

from typing import Any, Mapping, Optional, Union

from . import arrays, errors
from ._library import NULL, Handle, c_text, ffi, failure, lib, made, struct
from .pool import Plan, Pool, Threads

OUTPUTS_MAX = 16


class Delta(Handle):
    """Scratch and kernels for steps of up to `rows_max` rows over one pool. `isa` is the CPU's
    level: "auto", "scalar", "avx2", "avx512", "amx". With `x_f32` x may be float32 where the pool
    is not. `threads` None: the calling thread alone."""

    def __init__(self, pool: Pool, rows_max: int, *, threads: Optional[Threads] = None,
                 isa: Optional[str] = None, x_f32: bool = False) -> None:
        kept = c_text(isa, "isa")
        options = struct("sp_delta_options", pool=pool._pointer, rows_max=rows_max, x_f32=x_f32,
                         cpu_isa=kept, exec=threads._pointer if threads else NULL)
        over = (pool,) if threads is None else (pool, threads)
        self._own(made("sp_delta", lib.sp_delta_create, options), lib.sp_delta_destroy, *over)
        self.pool, self.rows_max = pool, rows_max
        self._gpu, self._geometry = pool.device.is_gpu, pool.layout.geometry
        self._sites: dict[Union[int, str], tuple[int, int, int]] = {}
        self._started: Any = None
        self._error = ffi.new("sp_error *")
        self._outputs = ffi.new("sp_delta_output[]", OUTPUTS_MAX)
        self._call = struct("sp_delta_call", outputs=self._outputs)

    def apply(self, plan: Plan, x: Any, outputs: Mapping[Union[int, str], Any], *,
              stream: Any = None) -> None:
        """Adds the plan's deltas to the outputs, in place: {site: y}, the site by number or path. x
        [rows, k_in] is what the base's GEMM read, y [rows, n_out] what it wrote. All of the sites
        read this x."""
        if len(outputs) > OUTPUTS_MAX:
            raise errors.WrongCall("bad-shape", "outputs", -1, "%d outputs, at most %d in one call"
                                   % (len(outputs), OUTPUTS_MAX))
        read, k_in = self._rows(plan, x, "x"), None
        with self.pool._turns:
            for slot, (site, y) in enumerate(outputs.items()):
                number, k_in, n_out = self._site(site)
                row = self._outputs[slot]
                wrote = self._rows(plan, y, "y", n_out, True)
                row.struct_bytes, row.site = ffi.sizeof("sp_delta_output"), number
                row.y, row.y_type = wrote.pointer, arrays.DTYPES[wrote.dtype]
                row.y_stride = wrote.strides[0]
                if read.shape[1] != k_in:
                    raise errors.WrongCall("bad-shape", "x", -1, "x has %d columns, site %s reads "
                                           "%d" % (read.shape[1], site, k_in))
            step = self._call
            step.plan, step.n_outputs, step.x = plan._pointer, len(outputs), read.pointer
            step.x_stride, step.x_type = read.strides[0], arrays.DTYPES[read.dtype]
            self._run(lib.sp_delta_apply, plan, step, stream)

    def embed(self, plan: Plan, tokens: Any, y: Any, *, stream: Any = None) -> None:
        """After the gather of the embeddings: y [rows, hidden] of the pool's type, in place; tokens
        [rows] int32."""
        lent = arrays.view(tokens, "tokens")
        if lent.dtype != "i32" or lent.shape != (plan.n_rows,) or lent.strides[0] != 1:
            raise errors.WrongCall("bad-shape", "tokens", -1, "tokens must be a dense int32 [%d], "
                                   "not %s %r" % (plan.n_rows, lent.dtype, lent.shape))
        self._check_place(lent, "tokens")
        site = self._geometry_kind(lib.SP_SITE_EMBEDDING, "an embedding")
        wrote = self._rows(plan, y, "y", self._site(site)[2], True)
        if wrote.dtype != self.pool.layout.dtype:
            raise errors.WrongCall("bad-dtype", "y", -1, "y is %s, the pool %s"
                                   % (wrote.dtype, self.pool.layout.dtype))
        step = struct("sp_delta_embed_call", plan=plan._pointer, y=wrote.pointer,
                      tokens=ffi.cast("int32_t *", lent.address), y_stride=wrote.strides[0])
        with self.pool._turns:
            self._run(lib.sp_delta_embed, plan, step, stream)

    def head(self, plan: Plan, x: Any, logits: Any, *, stream: Any = None) -> None:
        """After the head's GEMM, before a soft-cap: logits [rows, vocab], in place; x [rows,
        hidden] is what the head read. The plan is of these rows (Plan.select)."""
        site = self._geometry_kind(lib.SP_SITE_HEAD, "a head")
        _, k_in, n_out = self._site(site)
        read, wrote = self._rows(plan, x, "x", k_in), self._rows(plan, logits, "logits", n_out,
                                                                 True)
        step = struct("sp_delta_head_call", plan=plan._pointer, x=read.pointer,
                      x_stride=read.strides[0], x_type=arrays.DTYPES[read.dtype],
                      logits=wrote.pointer, logits_stride=wrote.strides[0],
                      logits_type=arrays.DTYPES[wrote.dtype])
        with self.pool._turns:
            self._run(lib.sp_delta_head, plan, step, stream)

    def has_tokens(self, kind: str) -> bool:
        """Whether embed ("embedding") or head ("head") has anything to do now."""
        number = {"embedding": lib.SP_SITE_EMBEDDING, "head": lib.SP_SITE_HEAD}[kind]
        return bool(lib.sp_delta_has_tokens(self._pointer, number))

    def upload(self, plan: Plan, *, stream: Any = None) -> None:
        """On a GPU: the plan's rows to the device. With start() the beginning of a step; the other
        calls do both where the plan was not started yet. Not to be captured: a host that captures a
        graph calls it before, and again before each replay, after the plan was built anew."""
        with self.pool._turns:
            self._checked(lib.sp_delta_upload(self._pointer, plan._pointer, self._stream(stream),
                                              self._error))

    def start(self, plan: Plan, *, stream: Any = None) -> None:
        """On a GPU: the node that sorts the rows which were uploaded; may be captured."""
        with self.pool._turns:
            self._checked(lib.sp_delta_start(self._pointer, plan._pointer, self._stream(stream),
                                             self._error))
            self._started = plan, plan.builds

    def _run(self, function: Any, plan: Plan, step: Any, stream: Any) -> None:
        step.stream = self._stream(stream)
        if self._gpu and self._started != (plan, plan.builds):
            for begin in (lib.sp_delta_upload, lib.sp_delta_start):
                self._checked(begin(self._pointer, plan._pointer, step.stream, self._error))
            self._started = plan, plan.builds
        self._checked(function(self._pointer, step, self._error))

    def _checked(self, status: int) -> None:
        if status != 0:
            raise failure(status, self._error)

    def _stream(self, stream: Any) -> Any:
        if not self._gpu:
            return NULL
        if stream is None:
            return self.pool.device.current_stream()
        return (stream if isinstance(stream, Handle) else self.pool.device.stream(stream))._pointer

    def _site(self, site: Union[int, str]) -> tuple[int, int, int]:
        """Number, k_in and n_out of a site by its number or path."""
        found = self._sites.get(site)
        if found is None:
            number = self._geometry.find(site) if isinstance(site, str) else site
            if not 0 <= number < len(self._geometry):
                raise errors.WrongCall("no-such-site", str(site), -1,
                                       "the geometry has no such site")
            row = self._geometry[number]
            found = self._sites[site] = number, row.k_in, row.n_out
        return found

    def _geometry_kind(self, kind: int, what: str) -> int:
        number = int(lib.sp_geometry_find_kind(self._geometry._pointer, kind))
        if number < 0:
            raise errors.WrongCall("no-such-site", "geometry", -1, "it does not have %s" % what)
        return number

    def _rows(self, plan: Plan, tensor: Any, what: str, columns: int = 0,
              write: bool = False) -> arrays.View:
        lent = arrays.rows_of(tensor, what, columns, write)
        if lent.shape[0] != plan.n_rows:
            raise errors.WrongCall("bad-shape", what, -1, "%s has %d rows, the plan %d"
                                   % (what, lent.shape[0], plan.n_rows))
        if lent.dtype not in arrays.DTYPES:
            raise errors.WrongCall("bad-dtype", what, -1, "%s is of integers" % what)
        self._check_place(lent, what)
        return lent

    def _check_place(self, lent: arrays.View, what: str) -> None:
        """The library gets addresses alone: a wrong kind of memory must be found here."""
        if (lent.device in (arrays.CPU, arrays.CUDA_PINNED)) == self._gpu or (
                self._gpu and lent.device_index != self.pool.device.index):
            raise errors.WrongCall("wrong-device", what, -1, "%s is on DLPack's device %d:%d, the "
                                   "pool on %s" % (what, lent.device, lent.device_index,
                                                   self.pool.device.name))
