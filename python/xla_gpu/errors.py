"""Exceptions of the package, beside ValueError for shapes and values and TypeError for dtypes and types."""


class LibraryError(RuntimeError):
    """libxla_gpu_ffi.so cannot be found, loaded or used."""


class TargetError(ValueError):
    """An FFI target is not registered where it is called, or cannot be registered."""


class HandlerError(RuntimeError):
    """A handler failed for a reason that is not the caller's: its InvalidArgument is raised as ValueError instead."""


class CompatibilityError(RuntimeError):
    """A framework, plug-in or driver is missing, or of a version that does not fit; the text says what to do."""


# Users meet these names in tracebacks; the module that they can import them from is the public one.
for _error in (LibraryError, TargetError, HandlerError, CompatibilityError):
    _error.__module__ = "xla_gpu.errors"
