"""Files handled with care: trust, atomic publishing, and moving damage aside."""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path

ASIDE_MARK = ".damaged-"
# Where SQLite's write-ahead log must not be used: its shared memory reaches one host only.
_NETWORK_TYPES = frozenset({"nfs", "nfs4", "cifs", "smb3", "smbfs", "lustre", "gpfs", "beegfs", "ceph", "afs", "9p"})
_NETWORK_TYPES |= {"fuse.sshfs", "fuse.glusterfs", "fuse.ceph", "fuse.s3fs", "orangefs", "panfs"}


def world_writable(path: Path) -> str | None:
    """The sentence for a file or directory that anybody may write; None where only trusted users may.

    Its parent counts too, where anybody may replace it as a whole.
    """
    for place, sticky_is_fine in ((path, False), (Path(os.path.realpath(path)).parent, True)):
        try:
            mode = place.stat().st_mode
        except OSError:
            continue
        if mode & stat.S_IWOTH and not (sticky_is_fine and mode & stat.S_ISVTX):
            return f"{place} is writable by everybody (mode {stat.S_IMODE(mode):04o}); `chmod o-w {place}` to use it"
    return None


def foreign_owner(path: Path) -> str | None:
    """The sentence for a path that belongs to another user (root is trusted); None otherwise."""
    try:
        owner = path.stat().st_uid
    except OSError:
        return None
    if owner in (0, os.geteuid()):
        return None
    return f"{path} belongs to user {owner}, this process runs as user {os.geteuid()}"


def unwritable(directory: Path) -> str | None:
    """Why files can't be made in `directory` (or in the nearest ancestor that exists); None if they can."""
    place = directory.absolute()
    while not place.exists() and place != place.parent:
        place = place.parent
    if not place.is_dir():
        return f"{place} is not a directory"
    if os.statvfs(place).f_flag & os.ST_RDONLY:
        return f"{place} lies on a read-only file system"
    if not os.access(place, os.W_OK | os.X_OK):
        return f"no permission to write in {place}"
    return None


def network_file_system(path: Path, mounts: Path = Path("/proc/self/mounts")) -> str | None:
    """The type of the network file system that holds `path`; None for a local one, or where it can't be told."""
    try:
        lines = mounts.read_text(errors="replace").splitlines()
    except OSError:
        return None
    place = os.path.realpath(path)  # unlike resolve(), raises for no loop of links
    best, kind = "", ""
    for line in lines:
        fields = line.split(" ")
        if len(fields) < 3:
            continue
        mount = fields[1].replace("\\040", " ")
        under = mount == "/" or place == mount or place.startswith(mount + "/")
        if under and len(mount) >= len(best):  # the later one of two mounts on a place is on top
            best, kind = mount, fields[2]
    return kind if kind in _NETWORK_TYPES else None


@contextlib.contextmanager
def used(directory: Path) -> Iterator[None]:
    """Marks a directory as in use, for as long as the context or until this process dies."""
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(handle, fcntl.LOCK_SH)
        yield
    finally:
        os.close(handle)


def in_use(path: Path) -> bool:
    """Whether a living process marks a directory as in use, or holds a lock file."""
    try:
        handle = os.open(path, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(handle)
    return False


def fresh_name() -> str:
    """A file name that no other process makes: for scratch files that get renamed."""
    return f"{os.getpid()}-{os.urandom(6).hex()}"


def fsync_directory(directory: Path) -> None:
    """Make renames in `directory` durable; file systems that can't are left alone."""
    with contextlib.suppress(OSError):
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def publish(content: bytes, target: Path, scratch: Path, mode: int = 0o644) -> None:
    """Write `content` so that `target` is either absent, the old file or all of the new one.

    `scratch` is a directory of the same file system; a crash may leave a file there.
    """
    temporary = scratch / fresh_name()
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        try:
            os.replace(temporary, target)
        except FileNotFoundError:
            target.parent.mkdir(parents=True, exist_ok=True)
            os.replace(temporary, target)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    fsync_directory(target.parent)


def aside_name(path: Path) -> Path:
    """Where a damaged file goes: beside itself, dated, never on top of an earlier one."""
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    return path.with_name(f"{path.name}{ASIDE_MARK}{stamp}-{fresh_name()}")
