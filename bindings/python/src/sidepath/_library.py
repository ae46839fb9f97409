"""The native library: where it is, how its functions are called, and who frees what they make.

Ownership. Python destroys objects in any order once they are in a cycle, but a delta must go before
its pool. So every native object has an `Owner` that counts what is built over it: it is freed when
nobody wants it any more and nothing over it is left, whatever the order in which Python lets go.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any, Callable, Optional, TypeVar

from . import errors
from ._declarations import VERSION
from ._declarations import ffi as ffi

LIBRARY_VARIABLE = "SIDEPATH_LIBRARY"
TEXTS = "utf-8", "replace"


def _find() -> str:
    """The library beside this file, as a wheel has it, or the one that the environment names."""
    named = os.environ.get(LIBRARY_VARIABLE)
    if named:
        return named
    beside = Path(__file__).parent / "lib" / "libsidepath_python.so"
    if beside.is_file():
        return str(beside)
    raise ImportError("%s is missing: install the package with pip, or name a libsidepath_engine.so"
                      " in %s" % (beside, LIBRARY_VARIABLE))


def _load() -> Any:
    path = _find()
    try:
        library = ffi.dlopen(path)
        found = library.sp_library_version()
    except (OSError, AttributeError) as error:
        raise ImportError("%s cannot be loaded: %s" % (path, error)) from error
    if found < VERSION or found // 100 != VERSION // 100:
        raise ImportError("%s has version %d, this package was built for %d: install both from one "
                          "tree" % (path, found, VERSION))
    return library


lib = _load()
NULL = ffi.NULL


def text(pointer: Any) -> str:
    """A C string; "" for NULL."""
    return ffi.string(pointer).decode(*TEXTS) if pointer != NULL else ""


def failure(status: int, error: Any) -> errors.SidepathError:
    """The exception for a status and the sp_error that explains it."""
    return errors.of_status(status)(
        text(error.code), text(error.subject), int(error.position),
        text(error.text) or text(lib.sp_status_text(status)), int(status),
        text(lib.sp_status_name(status)))


def call(function: Any, *arguments: Any) -> None:
    """A function that returns a status and takes an sp_error last."""
    error = ffi.new("sp_error *")
    status = function(*arguments, error)
    if status != 0:
        raise failure(status, error)


def attempt(function: Any, *arguments: Any) -> int:
    """The same where "not yet" (a positive status) is an answer: gives the status."""
    error = ffi.new("sp_error *")
    status = int(function(*arguments, error))
    if status < 0:
        raise failure(status, error)
    return status


def made(kind: str, function: Any, *arguments: Any) -> Any:
    """The pointer that a function puts into the place before its sp_error."""
    out = ffi.new(kind + " **")
    call(function, *arguments, out)
    return out[0]


def struct(kind: str, /, **fields: Any) -> Any:
    """One of the library's structs that grow: its defaults, if it has any, and these fields. What
    the fields point to the caller keeps alive."""
    out = ffi.new(kind + " *")
    defaults = getattr(lib, kind + "_default", None)
    if defaults is not None:
        defaults(out, ffi.sizeof(kind))
    out.struct_bytes = ffi.sizeof(kind)
    for field, value in fields.items():
        setattr(out, field, value)
    return out


def encode(value: Any, what: str) -> bytes:
    """A text for C; it says so where there is a NUL inside."""
    encoded = os.fsencode(value) if isinstance(value, os.PathLike) else str(value).encode()
    if b"\0" in encoded:
        raise errors.WrongCall("bad-text", what, encoded.index(b"\0"), "there is a NUL in a text")
    return encoded


def c_text(value: Any, what: str) -> Any:
    """The same in memory that lives as long as what is returned; NULL for None."""
    return NULL if value is None else ffi.new("char[]", encode(value, what))


# ---- ownership ----------------------------------------------------------------------------------

_lock = threading.RLock()


def _renew_lock() -> None:
    """In the child of a fork: whoever held the lock is not there."""
    global _lock
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_renew_lock)


class Owner:
    """One native object, the owners of what it was built over, and how many are built over it."""

    __slots__ = ("pointer", "_destroy", "_parents", "_over", "_wanted")

    def __init__(self, pointer: Any, destroy: Callable[[Any], Any], *parents: "Owner") -> None:
        self.pointer, self._destroy, self._parents = pointer, destroy, parents
        self._over, self._wanted = 0, True
        with _lock:
            for parent in parents:
                parent._over += 1

    def drop(self) -> None:
        """Nobody wants it any more; twice is harmless."""
        with _lock:
            self._wanted = False
            self._settle()

    def _settle(self) -> None:
        if self._wanted or self._over or self._destroy is None:
            return
        destroy, self._destroy = self._destroy, None  # type: ignore[assignment]
        destroy(self.pointer)
        for parent in self._parents:
            parent._over -= 1
            parent._settle()


HandleT = TypeVar("HandleT", bound="Handle")


class Handle:
    """What all objects of this package have in common: close(), the context manager, and a clear
    word for a use after close(). An object keeps alive what it needs; closing one that others need
    ends its use from here and frees it when they are closed."""

    _owner: Optional[Owner] = None

    def _own(self, pointer: Any, destroy: Callable[[Any], Any], *parents: "Handle") -> None:
        self._owner = Owner(pointer, destroy, *[parent._alive() for parent in parents])

    def _alive(self) -> Owner:
        if self._owner is None:
            what = type(self).__name__
            raise errors.Closed("closed", what, -1, "this %s was closed, or never made" % what)
        return self._owner

    @property
    def _pointer(self) -> Any:
        return self._alive().pointer

    @property
    def closed(self) -> bool:
        """Whether close() was called."""
        return self._owner is None

    def close(self) -> None:
        """Gives up what this object holds; twice is harmless."""
        owner, self._owner = self._owner, None
        if owner is not None:
            owner.drop()

    def __enter__(self: HandleT) -> HandleT:
        self._alive()
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def __del__(self) -> None:
        try:
            self.close()
        except Exception:  # the interpreter is ending, and half of it is gone
            pass

    def __reduce__(self) -> Any:
        raise TypeError("a %s lives in native memory and cannot be pickled or copied"
                        % type(self).__name__)


def library_version() -> str:
    """The version of the native library, "0.2.0"."""
    return text(lib.sp_library_version_text())
