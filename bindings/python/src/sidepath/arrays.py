"""Tensors of others as the library takes them: where they are, their type, shape and strides.

numpy arrays, torch tensors, everything with `__dlpack__`, and buffers of floats. Nothing is copied,
and neither numpy nor torch is imported. numpy has no bfloat16 of its own: an array of the package
ml_dtypes is one, and `bfloat16(array)` says that an array of uint16 holds such bits."""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple, Optional

from . import errors
from ._library import NULL, ffi, lib

CPU, CUDA, CUDA_PINNED, CUDA_MANAGED = 1, 2, 3, 13  # the numbers of DLPack
NAMES = {lib.SP_DTYPE_F32: "f32", lib.SP_DTYPE_BF16: "bf16", lib.SP_DTYPE_F16: "f16"}
DTYPES = {name: number for number, name in NAMES.items()}
TENSOR_TYPES = {"f32": lib.SP_TENSOR_F32, "bf16": lib.SP_TENSOR_BF16, "f16": lib.SP_TENSOR_F16}
BYTES = {"f32": 4, "bf16": 2, "f16": 2, "i32": 4}
_NUMPY = {("<f4", "float32"): "f32", ("<f2", "float16"): "f16", ("<i4", "int32"): "i32"}
_TORCH = {"torch.float32": "f32", "torch.bfloat16": "bf16", "torch.float16": "f16",
          "torch.int32": "i32"}
_DLPACK = {(2, 32): "f32", (4, 16): "bf16", (2, 16): "f16", (0, 32): "i32"}
_BUFFER = {"f": "f32", "<f": "f32", "e": "f16", "<e": "f16", "i": "i32", "<i": "i32"}


class View(NamedTuple):
    """A tensor that its owner lends: as long as `owner` lives, and it is not resized."""
    address: int
    dtype: str  # "f32", "bf16", "f16" or "i32"
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # in elements
    device: int
    device_index: int
    owner: Any
    writable: bool = True

    @property
    def pointer(self) -> Any:
        """For a call of the library."""
        return ffi.cast("void *", self.address)


class bfloat16:
    """An array of uint16 whose elements are the bits of bfloat16 numbers."""

    def __init__(self, bits: Any) -> None:
        interface = getattr(bits, "__array_interface__", None)
        if not interface or interface["typestr"] != "<u2":
            raise errors.WrongCall("bad-tensor", "bfloat16", -1,
                                   "the bits of bfloat16 come as a numpy array of uint16")
        self.bits = bits


def dense(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a row-major tensor, in elements."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


def dtype_number(dtype: Any, what: str = "dtype") -> int:
    """The library's number for "f32", "bf16", "f16", or for such a type of torch or numpy."""
    name = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}.get(
        str(getattr(dtype, "__name__", dtype)).replace("torch.", ""), dtype)
    if name not in DTYPES:
        raise errors.WrongCall("bad-dtype", what, -1,
                               "%r is no type of a pool: use f32, bf16 or f16" % (dtype,))
    return int(DTYPES[name])


def _unknown(what: str, kind: Any) -> errors.SidepathError:
    return errors.WrongCall("bad-tensor", what, -1, "%s is not a tensor of float32, bfloat16, "
                            "float16 or int32 that can be read here: convert it first" % (kind,))


def _of_torch(tensor: Any, what: str) -> View:
    dtype, device = _TORCH.get(str(tensor.dtype)), tensor.device
    if dtype is None or device.type not in ("cpu", "cuda") or str(tensor.layout) != "torch.strided":
        raise _unknown(what, "a %s of %s on %s" % (type(tensor).__name__, tensor.dtype, device))
    return View(tensor.data_ptr(), dtype, tuple(tensor.shape), tuple(tensor.stride()),
                CUDA if device.type == "cuda" else CPU, device.index or 0, tensor)


def _of_numpy(array: Any, what: str, dtype: Optional[str]) -> View:
    interface = array.__array_interface__
    name = str(array.dtype)
    dtype = dtype or ("bf16" if name == "bfloat16" else
                      _NUMPY.get((interface["typestr"], name)))
    if dtype is None:
        raise _unknown(what, "an array of %s" % name)
    size, shape = BYTES[dtype], interface["shape"]
    strides = tuple(step // size for step in interface["strides"] or ()) or dense(shape)
    if interface["strides"] and any(step % size for step in interface["strides"]):
        raise _unknown(what, "an array whose strides are no whole elements")
    address, read_only = interface["data"]
    return View(address, dtype, shape, strides, CPU, 0, array, not read_only)


_get_capsule = ctypes.pythonapi.PyCapsule_GetPointer
_get_capsule.restype, _get_capsule.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]


def _of_dlpack(tensor: Any, what: str) -> View:
    capsule = tensor.__dlpack__()
    managed = ffi.cast("dl_managed_tensor *", _get_capsule(capsule, b"dltensor"))
    lent = managed.tensor
    dtype = _DLPACK.get((lent.type.code, lent.type.bits))
    if dtype is None or lent.type.lanes != 1:
        raise _unknown(what, "a tensor of DLPack's type %d with %d bits"
                       % (lent.type.code, lent.type.bits))
    shape = tuple(lent.shape[i] for i in range(lent.n_dims))
    strides = (tuple(lent.strides[i] for i in range(lent.n_dims)) if lent.strides != NULL
               else dense(shape))
    address = int(ffi.cast("uintptr_t", lent.data)) + lent.byte_offset
    # The capsule was not taken: it gives the memory back when it goes.
    return View(address, dtype, shape, strides, lent.device.device_type, lent.device.device_id,
                capsule)


def _of_buffer(data: Any, what: str) -> View:
    memory = memoryview(data)
    dtype = _BUFFER.get(memory.format)
    if dtype is None or not memory.shape:
        raise _unknown(what, "a buffer of format %r" % memory.format)
    address = int(ffi.cast("uintptr_t", ffi.from_buffer(memory)))
    strides = tuple(step // memory.itemsize for step in memory.strides or ())
    return View(address, dtype, tuple(memory.shape), strides, CPU, 0, memory, not memory.readonly)


def view(tensor: Any, what: str = "tensor") -> View:
    """What `tensor` lends; `what` names it in errors."""
    if isinstance(tensor, View):
        return tensor
    if isinstance(tensor, bfloat16):
        return _of_numpy(tensor.bits, what, "bf16")
    if hasattr(tensor, "data_ptr") and hasattr(tensor, "stride"):
        return _of_torch(tensor, what)
    if hasattr(tensor, "__array_interface__"):
        return _of_numpy(tensor, what, None)
    if hasattr(tensor, "__dlpack__"):
        return _of_dlpack(tensor, what)
    try:
        return _of_buffer(tensor, what)
    except TypeError:
        raise _unknown(what, "a %s" % type(tensor).__name__) from None


def rows_of(tensor: Any, what: str, columns: int = 0, write: bool = False) -> View:
    """A matrix whose rows are dense, as x, y and logits have to be; of `columns` where not 0."""
    lent = view(tensor, what)
    if len(lent.shape) != 2 or (lent.shape[1] > 1 and lent.strides[1] != 1):
        raise errors.WrongCall("bad-shape", what, -1, "%s must be [rows, columns] with dense rows, "
                               "not %r with strides %r" % (what, lent.shape, lent.strides))
    if columns and lent.shape[1] != columns:
        raise errors.WrongCall("bad-shape", what, -1, "%s has %d columns, its site has %d"
                               % (what, lent.shape[1], columns))
    if write and not lent.writable:
        raise errors.WrongCall("bad-tensor", what, -1, "%s is read-only" % what)
    # What a dimension of one says about its stride means nothing.
    return lent if lent.shape[0] > 1 else lent._replace(strides=(max(lent.shape[1], 1), 1))


# ---- out ----------------------------------------------------------------------------------------

_CODES = {"f32": (2, 32), "bf16": (4, 16), "f16": (2, 16)}
_lent: dict[int, Any] = {}  # what capsules that are out point to, by address
_Deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_Destructor = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)
_is_capsule = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p)(
    ("PyCapsule_IsValid", ctypes.pythonapi))
_open_capsule = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi))
_make_capsule = ctypes.pythonapi.PyCapsule_New
_make_capsule.restype = ctypes.py_object
_make_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]


def _take_back(address: int) -> None:
    _lent.pop(address, None)


def _drop_capsule(capsule: int) -> None:
    """A capsule that nobody took still has its first name."""
    if _is_capsule(capsule, b"dltensor"):
        _lent.pop(_open_capsule(capsule, b"dltensor"), None)


_deleter, _destructor = _Deleter(_take_back), _Destructor(_drop_capsule)


def to_dlpack(lent: View) -> Any:
    """A DLPack capsule over host memory; it keeps the owner alive until it is given back."""
    n_dims = len(lent.shape)
    shape, strides = ffi.new("int64_t[]", lent.shape), ffi.new("int64_t[]", lent.strides)
    managed = ffi.new("dl_managed_tensor *")
    tensor = managed.tensor
    tensor.data, tensor.n_dims = lent.pointer, n_dims
    tensor.device.device_type, tensor.type.lanes = lent.device, 1
    tensor.type.code, tensor.type.bits = _CODES[lent.dtype]
    tensor.shape, tensor.strides = shape, strides
    managed.deleter = ffi.cast("void *", ctypes.cast(_deleter, ctypes.c_void_p).value)
    address = int(ffi.cast("uintptr_t", managed))
    _lent[address] = managed, shape, strides, lent.owner
    return _make_capsule(address, b"dltensor", ctypes.cast(_destructor, ctypes.c_void_p))
