"""The deltas of a step: y += scale * (x · Aᵀ) · Bᵀ, each row with its own adapter.

    delta = sidepath.Delta(pool, rows_max=4096)
    delta.apply(plan, x, {"model.layers.0.self_attn.q_proj": q})    # q is changed in place

x and y are numpy arrays or torch tensors in the memory of the pool's device, row i being row i of
the plan. On a GPU calls only enqueue, on torch's current stream or the one that is given. The bits
of a row depend on its own x, y and adapter and on nothing else.

Experts have rows of their own, one for each expert that a token chose:

    delta.begin_experts(plan, chosen)                               # int32 [tokens, top_k]
    delta.apply_experts(x, {"model.layers.0.mlp.experts.0.gate_proj": gate,
                            "model.layers.0.mlp.experts.0.up_proj": up})"""

from __future__ import annotations

from typing import Any, Mapping, NamedTuple, Optional, Union

from . import arrays, errors
from ._library import NULL, Handle, c_text, ffi, failure, lib, made, struct
from .pool import Plan, Pool, Threads

OUTPUTS_MAX = 16


class _ExpertRows(NamedTuple):
    """What begin_experts said, and what its arrays belong to."""
    plan: Plan
    n_rows: int
    kept: tuple[Any, ...]


class Delta(Handle):
    """Scratch and kernels for steps of up to `rows_max` rows over one pool. `isa` is the CPU's
    level: "auto", "scalar", "avx2", "avx512", "amx". With `x_f32` x may be float32 where the pool
    is not. `threads` None: the calling thread alone. `expert_rows_max`: rows of experts that are
    computed at a time, which bounds the scratch and changes no bit; 0: the library's own number."""

    def __init__(self, pool: Pool, rows_max: int, *, threads: Optional[Threads] = None,
                 isa: Optional[str] = None, x_f32: bool = False,
                 expert_rows_max: int = 0) -> None:
        kept = c_text(isa, "isa")
        options = struct("sp_delta_options", pool=pool._pointer, rows_max=rows_max, x_f32=x_f32,
                         cpu_isa=kept, exec=threads._pointer if threads else NULL)
        if expert_rows_max:
            options.expert_rows_max = expert_rows_max
        over = (pool,) if threads is None else (pool, threads)
        self._own(made("sp_delta", lib.sp_delta_create, options), lib.sp_delta_destroy, *over)
        self.pool, self.rows_max = pool, rows_max
        self._gpu, self._geometry = pool.device.is_gpu, pool.layout.geometry
        self._sites: dict[Union[int, str], tuple[int, int, int]] = {}
        self._started: Any = None
        self._expert_rows: Optional[_ExpertRows] = None
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
        read = self._rows(plan, x, "x")
        with self.pool._turns:
            for slot, (site, y) in enumerate(outputs.items()):
                number, k_in, n_out = self._site(site)
                self._set_output(slot, number, self._rows(plan, y, "y", n_out, True))
                self._check_columns(read, site, k_in)
            step = self._call
            step.plan, step.n_outputs, step.x = plan._pointer, len(outputs), read.pointer
            step.x_stride, step.x_type = read.strides[0], arrays.DTYPES[read.dtype]
            self._run(lib.sp_delta_apply, plan, step, stream)

    def embed(self, plan: Plan, tokens: Any, y: Any, *, stream: Any = None) -> None:
        """After the gather of the embeddings: y [rows, hidden] of the pool's type, in place; tokens
        [rows] int32."""
        lent = self._numbers(tokens, "tokens", (plan.n_rows,))
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

    def begin_experts(self, plan: Plan, experts: Any = None, *, row_pair: Any = None,
                      expert_begin: Any = None, top_k: int = 0, stream: Any = None) -> None:
        """Which rows the calls of apply_experts that follow are about, until the next begin: once
        for each layer. A pair is token * top_k + k, the k-th expert that a token chose. Either
        `experts`, int32 [tokens, top_k]: row i is pair i, a number that no expert has is a row
        without delta; or `row_pair`, int32 [rows], the pairs sorted by expert, with `expert_begin`,
        int32 [experts + 1], and `top_k`. The arrays are borrowed until the last apply."""
        if (experts is None) == (row_pair is None) or (row_pair is None) != (expert_begin is None):
            raise errors.WrongCall("bad-shape", "experts", -1, "either experts, or row_pair and "
                                   "expert_begin with top_k")
        n_experts = int(lib.sp_geometry_experts(self._geometry._pointer))
        rows = struct("sp_moe_rows", n_tokens=plan.n_rows, n_experts=n_experts)
        if experts is not None:
            lent = [self._numbers(experts, "experts", (plan.n_rows, None))]
            rows.expert, rows.top_k = ffi.cast("int32_t *", lent[0].address), lent[0].shape[1]
            n_rows = lent[0].shape[0] * lent[0].shape[1]
        else:
            lent = [self._numbers(row_pair, "row_pair", (None,)),
                    self._numbers(expert_begin, "expert_begin", (n_experts + 1,))]
            rows.row_pair, rows.expert_begin = (ffi.cast("int32_t *", one.address) for one in lent)
            rows.top_k, rows.n_rows = top_k, lent[0].shape[0]
            n_rows = lent[0].shape[0]
        with self.pool._turns:
            self._expert_rows = None
            native = self._stream(stream)
            self._start(plan, native)
            self._checked(lib.sp_delta_experts_begin(self._pointer, plan._pointer, rows, native,
                                                     self._error))
            self._expert_rows = _ExpertRows(plan, n_rows, tuple(one.owner for one in lent))

    def apply_experts(self, x: Any, outputs: Mapping[Union[int, str], Any], *,
                      by_row: bool = False, stream: Any = None) -> None:
        """Adds the deltas of experts to the outputs of the rows that were begun, in place: {site:
        y} of modules of one layer that read this x, each by the number or path of any of its
        experts. y is [rows, n_out]; x [tokens, k_in], or with `by_row` [rows, k_in]: what the
        experts' down reads."""
        begun = self._expert_rows
        if begun is None:
            raise errors.WrongCall("no-rows", "begin_experts", -1, "no rows were begun")
        if not 0 < len(outputs) <= OUTPUTS_MAX:
            raise errors.WrongCall("bad-shape", "outputs", -1, "%d outputs, at most %d in one call"
                                   % (len(outputs), OUTPUTS_MAX))
        read = self._matrix(x, "x", begun.n_rows if by_row else begun.plan.n_rows)
        with self.pool._turns:
            for slot, (site, y) in enumerate(outputs.items()):
                number, k_in, n_out = self._site(site)
                wrote = self._matrix(y, "y", begun.n_rows, n_out, True)
                self._set_output(slot, number, wrote)
                self._check_columns(read, site, k_in)
            step = struct("sp_delta_experts_call", outputs=self._outputs, n_outputs=len(outputs),
                          x=read.pointer, x_stride=read.strides[0],
                          x_type=arrays.DTYPES[read.dtype],
                          x_rows=lib.SP_EXPERT_X_ROW if by_row else lib.SP_EXPERT_X_TOKEN)
            self._run(lib.sp_delta_experts_apply, begun.plan, step, stream)

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
        self._start(plan, step.stream)
        self._checked(function(self._pointer, step, self._error))

    def _start(self, plan: Plan, native: Any) -> None:
        """The beginning of a step on a GPU, where it was not made yet."""
        if not self._gpu or self._started == (plan, plan.builds):
            return
        for begin in (lib.sp_delta_upload, lib.sp_delta_start):
            self._checked(begin(self._pointer, plan._pointer, native, self._error))
        self._started = plan, plan.builds

    def _set_output(self, slot: int, number: int, wrote: arrays.View) -> None:
        row = self._outputs[slot]
        row.struct_bytes, row.site = ffi.sizeof("sp_delta_output"), number
        row.y, row.y_type = wrote.pointer, arrays.DTYPES[wrote.dtype]
        row.y_stride = wrote.strides[0]

    def _check_columns(self, read: arrays.View, site: Union[int, str], k_in: int) -> None:
        if read.shape[1] != k_in:
            raise errors.WrongCall("bad-shape", "x", -1, "x has %d columns, site %s reads %d"
                                   % (read.shape[1], site, k_in))

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
        return self._matrix(tensor, what, plan.n_rows, columns, write)

    def _numbers(self, tensor: Any, what: str, shape: tuple[Optional[int], ...]) -> arrays.View:
        """A dense array of int32; None: any number."""
        lent = arrays.view(tensor, what)
        fits = len(lent.shape) == len(shape) and all(
            want in (None, got) for want, got in zip(shape, lent.shape))
        dense = lent.strides[-1:] == (1,) and (
            len(shape) < 2 or lent.shape[0] < 2 or lent.strides[0] == lent.shape[1])
        if lent.dtype != "i32" or not fits or not dense:
            raise errors.WrongCall("bad-shape", what, -1, "%s must be a dense int32 [%s], not %s "
                                   "%r" % (what, ", ".join("*" if n is None else str(n)
                                                           for n in shape),
                                           lent.dtype, lent.shape))
        self._check_place(lent, what)
        return lent

    def _matrix(self, tensor: Any, what: str, n_rows: int, columns: int = 0,
                write: bool = False) -> arrays.View:
        lent = arrays.rows_of(tensor, what, columns, write)
        if lent.shape[0] != n_rows:
            raise errors.WrongCall("bad-shape", what, -1, "%s has %d rows, not %d"
                                   % (what, lent.shape[0], n_rows))
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
