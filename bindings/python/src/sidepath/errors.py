"""What a failed call raises. Every exception carries what the library said: the status, a stable
reason code, what it is about, the byte or index in it, and a sentence with what to do next."""

from __future__ import annotations


class SidepathError(Exception):
    """A call of the library failed. `code` is stable ("shape-mismatch") or ""; `subject` is the
    tensor, field, file or argument that it is about; `position` the byte or element in it, or -1;
    `status` the library's number and `status_name` its name ("SP_ERR_REFUSED")."""

    def __init__(self, code: str = "", subject: str = "", position: int = -1, text: str = "",
                 status: int = -2, status_name: str = "SP_ERR_STATE") -> None:
        self.code, self.subject, self.position = code, subject, position
        self.text, self.status, self.status_name = text, status, status_name
        super().__init__(code, subject, position, text, status, status_name)

    def __str__(self) -> str:
        place = self.subject if self.position < 0 else "%s, at %d" % (self.subject, self.position)
        said = "%s: %s" % (self.code or self.status_name, self.text)
        return "%s (%s)" % (said, place) if place else said


class Refused(SidepathError, ValueError):
    """The input is wrong: an adapter, a file, a request. docs/ADAPTERS.md lists the codes."""


class WrongCall(SidepathError, ValueError):
    """The call is wrong: an argument out of range, or an object in the wrong state."""


class Closed(WrongCall):
    """An object was used after it was closed."""


class NotYet(SidepathError):
    """Nothing has changed, and the same call may succeed later: every slot is held, or a load is
    going on."""


class Short(SidepathError, MemoryError):
    """A resource is missing: memory, threads, room in a budget, the disk."""


class DeviceFailed(SidepathError, RuntimeError):
    """The device failed, or there is none that can be used."""


def of_status(status: int) -> type[SidepathError]:
    """The class of a failure: by the range that its number is in, as status.h has them."""
    if status > 0:
        return NotYet
    ranges: tuple[tuple[int, type[SidepathError]], ...] = (
        (-99, WrongCall), (-199, Refused), (-299, Short), (-499, DeviceFailed))
    for least, kind in ranges:
        if status >= least:
            return kind
    return SidepathError
