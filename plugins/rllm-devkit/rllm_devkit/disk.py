"""Simulates disk failures at any operation, for one folder and this process."""

from __future__ import annotations

import builtins
import io
import os
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

Operation = Literal["open", "write", "truncate", "fsync", "rename", "unlink", "mkdir", "rmdir"]
OPERATIONS: tuple[Operation, ...] = ("open", "write", "truncate", "fsync", "rename", "unlink", "mkdir", "rmdir")


class InterceptedDisk:
    """Context manager that calls ``before`` ahead of every operation that changes something below ``root``.

    If ``before`` raises, the operation raises the same error and changes nothing. A write of several bytes becomes two
    operations, half each, to produce torn writes. It does not see files opened by C code. If two disks are entered at
    the same time, the outer one misses some writes.

    Args:
        root: Folder to watch.
        before: Called with the operation and its path; for a rename, the new path.
    """

    def __init__(self, root: Path, before: Callable[[Operation, Path], None]) -> None:
        self.root = Path(os.path.abspath(root))  # noqa: PTH100 - the folder may not exist yet
        self.before = before
        self._paths: dict[int, Path] = {}  # by open file descriptor
        self._saved: list[tuple[Any, str, Any]] = []

    def __enter__(self) -> InterceptedDisk:
        for module in (builtins, io):
            self._replace(module, "open", self._open)
        self._replace(os, "open", self._os_open)
        self._replace(os, "fsync", self._fsync)
        for name in ("rename", "replace"):
            self._replace(os, name, self._renaming(getattr(os, name)))
        for name, operation in (("unlink", "unlink"), ("remove", "unlink"), ("mkdir", "mkdir"), ("rmdir", "rmdir")):
            self._replace(os, name, self._by_path(getattr(os, name), operation))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for module, name, original in reversed(self._saved):
            setattr(module, name, original)
        self._saved.clear()

    def _replace(self, module: Any, name: str, function: Callable[..., Any]) -> None:
        self._saved.append((module, name, getattr(module, name)))
        setattr(module, name, function)

    def _original(self, name: str) -> Callable[..., Any]:
        return next(original for module, own, original in self._saved if module is os and own == name)  # type: ignore[no-any-return]

    def _inside(self, path: Any, dir_fd: int | None = None) -> Path | None:
        """Returns the absolute ``path`` if it is below the root."""
        if isinstance(path, int):
            return self._paths.get(path)
        where = Path(os.fsdecode(path))
        if dir_fd is not None:
            where = self._paths.get(dir_fd, Path("/")) / where
        where = Path(os.path.abspath(where))  # noqa: PTH100 - symlinks are left to the operation
        return where if where.is_relative_to(self.root) else None

    def _open(
        self,
        file: Any,
        mode: str = "r",
        buffering: int = -1,
        encoding: str | None = None,
        errors: str | None = None,
        newline: str | None = None,
        closefd: bool = True,
        opener: Any = None,
    ) -> Any:
        path = self._inside(file) if not isinstance(file, int) and opener is None else None
        if path is None or not set(mode) & set("wax+"):
            return self._saved[0][2](file, mode, buffering, encoding, errors, newline, closefd, opener)
        self.before("open", path)
        raw = _Raw(path, mode.replace("b", "").replace("t", ""), self.before)
        self._paths[raw.fileno()] = path
        if buffering == 0:
            return raw
        binary = io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)
        return binary if "b" in mode else io.TextIOWrapper(binary, encoding, errors, newline)

    def _os_open(self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        descriptor: int = self._original("open")(path, flags, mode, dir_fd=dir_fd)
        inside = self._inside(path, dir_fd)
        if inside is not None:
            self._paths[descriptor] = inside
        return descriptor

    def _fsync(self, descriptor: int) -> None:
        path = self._paths.get(descriptor)
        if path is not None:
            self.before("fsync", path)
        self._original("fsync")(descriptor)

    def _renaming(self, original: Callable[..., None]) -> Callable[..., None]:
        def rename(source: Any, target: Any, **options: Any) -> None:
            path = self._inside(target, options.get("dst_dir_fd"))
            if path is not None:
                self.before("rename", path)
            original(source, target, **options)

        return rename

    def _by_path(self, original: Callable[..., None], operation: Any) -> Callable[..., None]:
        def change(path: Any, *arguments: Any, **options: Any) -> None:
            inside = self._inside(path, options.get("dir_fd"))
            if inside is not None:
                self.before(operation, inside)
            original(path, *arguments, **options)

        return change


class _Raw(io.FileIO):
    """Unbuffered file that calls ``before`` ahead of every change."""

    def __init__(self, path: Path, mode: str, before: Callable[[Operation, Path], None]) -> None:
        super().__init__(str(path), mode)
        self._path = path
        self._before = before
        self._is_torn = False

    def write(self, data: Any) -> int:
        self._before("write", self._path)
        content = memoryview(data).cast("B")
        self._is_torn = not self._is_torn and len(content) > 1
        return super().write(content[: len(content) // 2] if self._is_torn else content)

    def truncate(self, size: int | None = None) -> int:
        self._before("truncate", self._path)
        return super().truncate(size)
