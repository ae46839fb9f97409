"""Many PEFT adapters over one transformers model, by forward hooks and libsidepath's C interface.

    host = attach(model, {"support": "adapters/support", "sql": "adapters/sql"})
    with host.batch(["support", None, "sql"]):     # the adapter of each sequence, None: the base
        tokens = model.generate(input_ids)         # [3, n]

The geometry is read from model.named_modules(); every adapter gets a slot of one pool; a hook on
every linear module, on the embedding and on the head adds to the output what the row's adapter
says. Needs torch, transformers and cffi, and libsidepath.so (SIDEPATH_LIBRARY, or on the loader's
path). Activations are on the CPU, in float32 or bfloat16. By hand: not part of the tests."""

import contextlib
import os

import cffi
import torch
from transformers.pytorch_utils import Conv1D

ffi = cffi.FFI()
ffi.cdef("""
    typedef struct { int status; const char *code; char subject[256]; int64_t position;
                     char text[512]; } sp_error;
    const char *sp_status_name(int status);
    typedef struct { size_t struct_bytes; const void *data; int dtype; int32_t rows, hidden;
        bool approximate; } sp_served_table;
    typedef struct { size_t struct_bytes; void *geometry; const char *name;
        int32_t rank_max, expert_rank_max; bool experts_off, allow_partial, allow_no_effect,
        allow_unknown_fields, allow_base_changing_init; int pool_dtype; const char *base_dir;
        int expert_layout; void *exec; const sp_served_table *served_embed, *served_head;
        } sp_adapter_options;
    typedef struct { size_t struct_bytes; const char *path, *module; int kind;
        int32_t layer, expert, k_in, n_out, group; bool tied; } sp_site;
    typedef struct { size_t struct_bytes; void *geometry; uint64_t modules; int32_t rank; int dtype;
        const sp_served_table *served_embed, *served_head; } sp_layout_options;
    typedef struct { size_t struct_bytes; void *layout, *device; int32_t slots;
        size_t overlay_bytes; } sp_pool_options;
    typedef struct { size_t struct_bytes; void *pool, *exec; int32_t rows_max;
        } sp_delta_options;
    typedef struct { int32_t slot; uint64_t generation; } sp_slot_handle;
    typedef struct { size_t struct_bytes; sp_slot_handle handle; int32_t n_rows; float scale;
        } sp_route_span;
    typedef struct { size_t struct_bytes; int32_t site; void *y; int64_t y_stride; int y_type;
        } sp_delta_output;
    typedef struct { size_t struct_bytes; const void *plan, *x; int64_t x_stride; int x_type;
        const sp_delta_output *outputs; int32_t n_outputs; } sp_delta_call;
    typedef struct { size_t struct_bytes; const void *plan; const int32_t *tokens; void *y;
        int64_t y_stride; } sp_delta_embed_call;
    typedef struct { size_t struct_bytes; const void *plan, *x; int64_t x_stride; int x_type;
        void *logits; int64_t logits_stride; int logits_type; } sp_delta_head_call;

    typedef struct { size_t struct_bytes; int32_t threads, spin_us; } sp_exec_options;
    void sp_exec_options_default(sp_exec_options *, size_t);
    int sp_geometry_create(const sp_site *, size_t, void **, sp_error *);
    void sp_adapter_options_default(sp_adapter_options *, size_t);
    int sp_adapter_open(const char *, const sp_adapter_options *, void **, sp_error *);
    int32_t sp_adapter_rank_max(const void *);
    void sp_adapter_release(void *);
    void sp_geometry_release(void *);
    uint64_t sp_geometry_kind_modules(const void *, int);
    void sp_layout_release(void *);
    void sp_device_close(void *);
    void sp_exec_destroy(void *);
    void sp_pool_destroy(void *);
    void sp_delta_destroy(void *);
    uint64_t sp_layout_pair_modules(const void *);
    void sp_layout_options_default(sp_layout_options *, size_t);
    int sp_layout_create(const sp_layout_options *, void **, sp_error *);
    int sp_layout_measure_overlay(const void *, const void *, size_t *, sp_error *);
    int sp_layout_pack(const void *, const void *, void *, void **, sp_error *);
    void sp_image_destroy(void *);
    int sp_device_open(const char *, const void *, void **, sp_error *);
    int sp_exec_create(const sp_exec_options *, void **, sp_error *);
    void sp_pool_options_default(sp_pool_options *, size_t);
    int sp_pool_create(const sp_pool_options *, void **, sp_error *);
    int sp_pool_load(void *, const void *, sp_slot_handle *, sp_error *);
    int sp_pool_release(void *, sp_slot_handle, sp_error *);
    void sp_delta_options_default(sp_delta_options *, size_t);
    int sp_delta_create(const sp_delta_options *, void **, sp_error *);
    int sp_plan_create(int32_t, int32_t, void **, sp_error *);
    const char *sp_library_version_text(void);
    int sp_plan_build(void *, const void *, const sp_route_span *, int32_t, int32_t, sp_error *);
    void sp_plan_destroy(void *);
    int sp_delta_apply(void *, const sp_delta_call *, sp_error *);
    int sp_delta_embed(void *, const sp_delta_embed_call *, sp_error *);
    int sp_delta_head(void *, const sp_delta_head_call *, sp_error *);
""")
sp = ffi.dlopen(os.environ.get("SIDEPATH_LIBRARY", "libsidepath.so"))
LINEAR, EMBEDDING, HEAD, ROUTER, EXPERT = range(5)
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


class SidepathError(RuntimeError):
    def __init__(self, status, error):
        self.status, self.code = status, ffi.string(error.code).decode() if error.code else ""
        super().__init__("%s %s: %s (%s)" % (
            ffi.string(sp.sp_status_name(status)).decode(), self.code,
            ffi.string(error.text).decode(), ffi.string(error.subject).decode()))


def call(function, *arguments):
    error = ffi.new("sp_error *")
    status = function(*arguments, error)
    if status != 0:
        raise SidepathError(status, error)


def made(function, *arguments):
    out = ffi.new("void **")
    call(function, *arguments, out)
    return out[0]


def struct(name, **fields):
    """One of the library's structs: its defaults, if it has any, and these fields."""
    out = ffi.new(name + " *", {"struct_bytes": ffi.sizeof(name)})
    if name.endswith("_options"):
        getattr(sp, name + "_default")(out, ffi.sizeof(name))
    for field, value in fields.items():
        setattr(out, field, value)
    return out


def served(weight):
    return struct("sp_served_table", data=pointer(weight), dtype=DTYPES[weight.dtype],
                  rows=weight.shape[0], hidden=weight.shape[1])


def pointer(tensor):
    return ffi.cast("void *", tensor.data_ptr())


def dimensions(module):
    """k_in and n_out of a linear module; Conv1D (GPT-2) has its weight transposed."""
    shape = module.weight.shape
    return tuple(shape) if isinstance(module, Conv1D) else (shape[1], shape[0])


def unserved(path, module, layer):
    """Router and experts: said, so that an adapter of them is refused for what it is."""
    fused = dict(module.named_parameters(recurse=False))
    if "gate_up_proj" in fused and fused["gate_up_proj"].dim() == 3:
        experts, wide, hidden = fused["gate_up_proj"].shape
        shapes = {"gate_proj": (hidden, wide // 2), "up_proj": (hidden, wide // 2),
                  "down_proj": (wide // 2, hidden)}
        return [("%s.%d.%s" % (path, expert, name), EXPERT, layer, expert, *shape, False)
                for expert in range(experts) for name, shape in shapes.items()]
    if path.endswith(".mlp.gate") and "weight" in fused:
        return [(path, ROUTER, layer, -1, *dimensions(module), False)]
    return []


class Host:
    """A pool of adapters beside one model, and the hooks that apply them. See attach."""

    def __init__(self, model, adapters, rows_max=8192):
        self.model, self.names, self.plans, self.watch = model, None, {}, None
        self.embed, self.head = model.get_input_embeddings(), model.get_output_embeddings()
        self.dtype = DTYPES[self.embed.weight.dtype]
        # An embedding that scales what it gathers is left out, and so are adapters of it.
        self.has_embed = type(self.embed) is torch.nn.Embedding
        self.served = {"served_head": served(self.head.weight)}
        if self.has_embed:
            self.served["served_embed"] = served(self.embed.weight)
        self.geometry = self._describe()
        opened = {name: self._open(path) for name, path in adapters.items()}
        self._make_pool(list(opened.values()))
        self.routes = {None: (-1, 0)}  # slot -1: the base
        for name, adapter in opened.items():
            self.routes[name] = self._load(adapter)
            sp.sp_adapter_release(adapter)  # the pool has what it needs
        self.delta = made(sp.sp_delta_create, struct("sp_delta_options", pool=self.pool,
                                                      exec=self.exec, rows_max=rows_max))
        self.hooks = [model.get_submodule(path).register_forward_hook(self._hook(site))
                      for path, site in self.sites.items()]

    def close(self):
        """Takes the hooks off and gives everything back, users before what they use."""
        for hook in self.hooks:
            hook.remove()
        sp.sp_delta_destroy(self.delta)
        for name, handle in self.routes.items():
            if name is not None:
                call(sp.sp_pool_release, self.pool, handle)
        sp.sp_pool_destroy(self.pool)
        sp.sp_layout_release(self.layout)
        sp.sp_geometry_release(self.geometry)
        sp.sp_exec_destroy(self.exec)
        sp.sp_device_close(self.device)

    def _describe(self):
        """A row for each place of the text model that an adapter may name; hooks where it can."""
        decoder, rows, self.sites = self.model.get_decoder(), [], {}
        inside = {id(module) for module in decoder.modules()}
        tied = self.has_embed and self.embed.weight.data_ptr() == self.head.weight.data_ptr()
        for path, module in self.model.named_modules():
            numbers = [int(word) for word in path.split(".") if word.isdigit()]
            layer = numbers[0] if numbers else -1
            if module is self.head:
                sites = [(path, HEAD, -1, -1, *dimensions(module), tied)]
            elif id(module) not in inside:
                continue
            elif module is self.embed:
                if not self.has_embed:
                    continue
                sites = [(path, EMBEDDING, -1, -1, *module.weight.shape, False)]
            elif isinstance(module, (torch.nn.Linear, Conv1D)) and len(numbers) == 1:
                sites = [(path, LINEAR, layer, -1, *dimensions(module), False)]
            else:
                sites = unserved(path, module, layer)
            if len(sites) == 1 and sites[0][1] <= HEAD:
                self.sites[path] = (len(rows), sites[0][1])
            rows += sites
        texts = [ffi.new("char[]", path.encode()) for path, *_ in rows]
        size = ffi.sizeof("sp_site")
        table = ffi.new("sp_site[]", [
            (size, text, ffi.NULL, kind, layer, expert, k_in, n_out, -1, tied)
            for text, (_, kind, layer, expert, k_in, n_out, tied) in zip(texts, rows)])
        return made(sp.sp_geometry_create, table, len(rows))

    def _open(self, path):
        settings = struct("sp_adapter_options", geometry=self.geometry, pool_dtype=self.dtype,
                          **self.served)
        return made(sp.sp_adapter_open, os.fsencode(path), settings)

    def _make_pool(self, opened):
        self.device = made(sp.sp_device_open, b"cpu", ffi.NULL)
        self.exec = made(sp.sp_exec_create, struct("sp_exec_options"))
        layout = struct("sp_layout_options", geometry=self.geometry, dtype=self.dtype, rank=1,
                        **self.served)
        for adapter in opened:
            layout.rank = max(layout.rank, sp.sp_adapter_rank_max(adapter))
            layout.modules |= sp.sp_layout_pair_modules(adapter)
        for kind in (ROUTER, EXPERT):  # no slot holds these: packing says which adapter needs them
            layout.modules &= ~sp.sp_geometry_kind_modules(self.geometry, kind)
        self.layout = made(sp.sp_layout_create, layout)
        settings = struct("sp_pool_options", layout=self.layout, device=self.device,
                           slots=len(opened))
        for adapter in opened:
            size = ffi.new("size_t *")
            call(sp.sp_layout_measure_overlay, self.layout, adapter, size)
            settings.overlay_bytes += size[0]
        self.pool = made(sp.sp_pool_create, settings)

    def _load(self, adapter):
        handle = ffi.new("sp_slot_handle *")
        image = made(sp.sp_layout_pack, self.layout, adapter, self.exec)
        call(sp.sp_pool_load, self.pool, image, handle)  # held until close
        sp.sp_image_destroy(image)
        return handle[0]

    def make_plan(self, names, rows):
        """The plan of a forward pass with so many rows for each of the adapters."""
        size = ffi.sizeof("sp_route_span")
        spans = [(size, self.routes[name], rows, 1.0) for name in names]
        plan = ffi.gc(made(sp.sp_plan_create, rows * len(names), len(self.routes)),
                      sp.sp_plan_destroy)
        call(sp.sp_plan_build, plan, self.pool, ffi.new("sp_route_span[]", spans), len(spans), 0)
        return plan

    @contextlib.contextmanager
    def batch(self, names):
        """Forward passes inside have one sequence for each name (None: the base), in this order."""
        self.names = list(names)
        try:
            yield self
        finally:
            self.names, self.plans = None, {}

    def apply(self, plan, site, x, y):
        """Adds the plan's deltas at one site to y [rows, n_out]; x [rows, k_in], or tokens."""
        number, kind = site
        if kind == EMBEDDING:
            call(sp.sp_delta_embed, self.delta, struct(
                "sp_delta_embed_call", plan=plan, tokens=ffi.cast("int32_t *", x.data_ptr()),
                y=pointer(y), y_stride=y.stride(0)))
        elif kind == HEAD:
            call(sp.sp_delta_head, self.delta, struct(
                "sp_delta_head_call", plan=plan, x=pointer(x), x_stride=x.stride(0),
                x_type=self.dtype, logits=pointer(y), logits_stride=y.stride(0),
                logits_type=self.dtype))
        else:
            output = struct("sp_delta_output", site=number, y=pointer(y), y_stride=y.stride(0),
                            y_type=self.dtype)
            call(sp.sp_delta_apply, self.delta, struct(
                "sp_delta_call", plan=plan, x=pointer(x), x_stride=x.stride(0), x_type=self.dtype,
                outputs=output, n_outputs=1))

    def _hook(self, site):
        def hook(module, arguments, output):
            if self.names is None:
                return None
            x = arguments[0].detach()
            x = x.reshape(-1).int() if module is self.embed else x.reshape(-1, x.shape[-1])
            x, y = x.contiguous(), output.detach().reshape(len(x), -1).contiguous()
            before = y.clone() if self.watch else None
            rows = len(x) // len(self.names)
            if rows not in self.plans:  # the head may run on fewer rows than the layers
                self.plans[rows] = self.make_plan(self.names, rows)
            self.apply(self.plans[rows], site, x, y)
            if self.watch:
                self.watch(site, x, before, y)
            return y.view_as(output)
        return hook


def attach(model, adapters, rows_max=8192):
    """Loads the adapters (name: folder) and hooks the model. Route sequences with host.batch."""
    return Host(model, adapters, rows_max)


def version():
    return ffi.string(sp.sp_library_version_text()).decode()
