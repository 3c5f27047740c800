"""Values on their way to and from workers: by reference where the other side can import.

A worker never imports the user's `__main__`, and it cannot import a module that only this process
knows (a notebook's helper, a test loaded by path). Functions and classes of such modules travel by
value, with cloudpickle. Everything else takes the standard pickler, which is twice as fast.

Laws:
    1. A class that travelled by value comes back as the same class (cloudpickle tracks it).
    2. Exceptions keep their type, their notes, and the worker's traceback as text.
    3. cloudpickle's registry of modules is as it was when a call ends.

Imports: errors. Used by: processes, manager, worker.
"""

import functools
import io
import os
import pickle
import sys
import threading
import traceback
from importlib.machinery import ModuleSpec
from types import CodeType, FunctionType, ModuleType
from typing import Any

import cloudpickle

from zephon_mm.errors import RunnerError

_PROTOCOL = 5
_NO_FILE = "<dynamic-code>"
_registry_lock = threading.Lock()


class WorkerTraceback(Exception):
    """The cause of an exception that was raised in a worker: its traceback, as text."""

    def __str__(self) -> str:
        """Return the text on lines of its own."""
        return f'\n"""\n{self.args[0]}"""'


class _ByValueNeeded(Exception):
    """The standard pickler met something that has to travel by value."""


class _Fast(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, (type, FunctionType)) and not is_importable(obj.__module__):
            raise _ByValueNeeded
        return NotImplemented


class _Thorough(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no annotations
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=_PROTOCOL)
        self.registered: list[ModuleType] = []

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, ModuleType):
            self._register(obj.__name__)
        elif isinstance(obj, (type, FunctionType)):
            self._register(obj.__module__)
        elif isinstance(obj, CodeType) and obj.co_filename != _NO_FILE:
            # cloudpickle drops the name of the file, and tracebacks from workers need it.
            return _in_file, (obj.replace(co_filename=_NO_FILE), obj.co_filename)
        return super().reducer_override(obj)

    def _register(self, name: str) -> None:
        module = sys.modules.get(name)
        if module is None or module.__name__ != name or is_importable(name):
            return
        if name != "__main__" and name not in cloudpickle.list_registry_pickle_by_value():
            cloudpickle.register_pickle_by_value(module)
            self.registered.append(module)


def _in_file(code: CodeType, name: str) -> CodeType:
    return code.replace(co_filename=name)


@functools.cache
def is_importable(name: str | None) -> bool:
    """Tell whether a new process with this `sys.path` would import this very module.

    It would not when the module is `__main__`, was made by hand, or was loaded from a file that
    the name does not lead to.
    """
    if name is None or name in sys.builtin_module_names:
        return True
    if name == "__main__":
        return False
    parent = name.rpartition(".")[0]
    if parent and (parent not in sys.modules or not is_importable(parent)):
        return False
    module = sys.modules.get(name)
    path = getattr(sys.modules[parent], "__path__", None) if parent else None
    for finder in sys.meta_path:  # not importlib.util.find_spec, which answers from sys.modules
        spec = finder.find_spec(name, path)
        if spec is not None:
            return _is_same_file(getattr(module, "__file__", None), spec)
    # Some compiled packages make their submodules while they load: importing the parent is enough.
    return bool(parent) and not hasattr(module, "__file__")


def _is_same_file(file: str | None, spec: ModuleSpec) -> bool:
    """Compare a loaded module's file with what would be imported; False only if that is clear."""
    if file is None or spec.origin is None or not spec.has_location:
        return True  # built in, frozen, a namespace
    try:
        return os.path.samefile(file, spec.origin)
    except OSError:
        return file == spec.origin


def dumps(value: Any) -> bytes:
    """Return the pickle of a value, functions and classes by value where needed.

    Raises:
        Exception: Whatever the value's own pickling raises.
    """
    file = io.BytesIO()
    try:
        _Fast(file, _PROTOCOL).dump(value)
        return file.getvalue()
    except Exception:  # noqa: BLE001  # what the fast pickler refuses, the other one may take
        return _dumps_by_value(value)


def _dumps_by_value(value: Any) -> bytes:
    file = io.BytesIO()
    with _registry_lock:
        pickler = _Thorough(file)
        try:
            pickler.dump(value)
        finally:
            for module in pickler.registered:
                cloudpickle.unregister_pickle_by_value(module)
    return file.getvalue()


def dumps_error(error: BaseException) -> bytes:
    """Return the pickle of an exception, its notes and the text of its traceback.

    An exception that does not survive a pickle becomes a RunnerError that says so.
    """
    text = "".join(traceback.format_exception(error))
    notes = tuple(getattr(error, "__notes__", ()))
    try:
        data = dumps((error, notes, text))
        pickle.loads(data)
        return data
    except Exception as refusal:  # noqa: BLE001  # the user's class, whatever it does
        substitute = RunnerError(
            f"a task raised {type(error).__name__}: {error}, which cannot be sent to the trainer "
            f"({type(refusal).__name__}: {refusal}). Make the exception picklable: its arguments "
            "must be what its __init__ takes."
        )
        return dumps((substitute, (), text))


def loads_error(data: bytes) -> BaseException:
    """Return the exception that `dumps_error` packed, with the traceback as its cause."""
    error: BaseException
    error, notes, text = pickle.loads(data)
    if notes and not getattr(error, "__notes__", None):
        for note in notes:
            error.add_note(note)
    error.__cause__ = WorkerTraceback(text)
    return error
