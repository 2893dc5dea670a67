"""The values that flow through the pipeline.

Everything here is frozen, hashable where it serves as a key, and turns into
plain JSON with :func:`to_json`; no module of this file's layer imports
anything heavy.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, Union

if TYPE_CHECKING:
    from tunekit.arch import Arch

Value = Union[bool, int, float, str]


class Values(Mapping[str, Value]):
    """An immutable, hashable mapping of names to plain values, in the order given.

    Names also read as attributes (``v.head_dim``), which keeps constraints and
    footprints short. Equality and hash ignore the order and tell ``True`` from ``1``.
    Some may go without saying (see :meth:`implying`); only the text differs by that.
    """

    __slots__ = ("_hash", "_implied", "_items")
    _items: dict[str, Value]
    _implied: frozenset[str]
    _hash: int | None  # made when it is first asked for

    def __init__(self, items: Mapping[str, Value] | None = None, /, **more: Value) -> None:
        merged = {**(items or {}), **more}
        object.__setattr__(self, "_items", merged)
        object.__setattr__(self, "_implied", frozenset())
        object.__setattr__(self, "_hash", None)

    def __getitem__(self, name: str) -> Value:
        return self._items[name]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        try:
            return self._items[name]
        except KeyError:
            raise AttributeError(f"no value '{name}'; there are {', '.join(self._items)}") from None

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError("Values are immutable")

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Values):
            return NotImplemented
        mine, others = self._items, other._items
        return mine == others and all(type(value) is type(others[name]) for name, value in mine.items())

    def __hash__(self) -> int:
        if self._hash is None:
            key = frozenset((name, type(value), value) for name, value in self._items.items())
            object.__setattr__(self, "_hash", hash(key))
        return self._hash  # type: ignore[return-value]

    def __reduce__(self) -> tuple[Callable[..., Values], tuple[dict[str, Value], frozenset[str]]]:
        return _implying, (dict(self._items), self._implied)

    def __repr__(self) -> str:
        return f"Values({self})"

    def __str__(self) -> str:
        """``a=1 b=True``: the form that the command line takes and prints, without what goes without saying."""
        return " ".join(f"{name}={value}" for name, value in self._items.items() if name not in self._implied)

    def implying(self, names: Collection[str]) -> Values:
        """The same values; the text leaves out those of `names`, which the reader can fill in."""
        return _implying(self._items, frozenset(names))

    def merged(self, other: Mapping[str, Value]) -> Values:
        """These values with `other`'s added or put in their place."""
        return Values({**self._items, **(other._items if isinstance(other, Values) else other)})

    def only(self, names: Any) -> Values:
        """The values whose name is in `names`, in this mapping's order."""
        return Values({name: value for name, value in self._items.items() if name in names})


def _implying(items: Mapping[str, Value], names: frozenset[str]) -> Values:
    values = Values(items)
    object.__setattr__(values, "_implied", names)
    return values


@dataclass(frozen=True)
class Variant:
    """One point of a spec's space. `id` is a hash of every field (see identity)."""

    spec: str
    version: int
    implementation: str
    arch: str
    tunables: Values
    id: str

    def __str__(self) -> str:
        return f"{self.implementation} {self.tunables}"


@dataclass(frozen=True)
class Footprint:
    """What one CTA needs. `None` means not known from this reading.

    Units: bytes, TMEM columns (512 columns x 128 lanes x 4 bytes a CTA), threads,
    CTAs a cluster, 32-bit registers a thread, spilled bytes a thread.
    """

    smem_bytes: int | None = None
    tmem_columns: int | None = None
    threads: int | None = None
    cluster: int | None = None
    registers: int | None = None
    spill_bytes: int | None = None
    local_bytes: int | None = None

    def misfit(self, arch: Arch) -> str | None:
        """Why this can't run on `arch`, in a sentence with both numbers; None if it fits."""
        limits = (
            ("smem", self.smem_bytes, arch.smem_bytes, "B"),
            ("tmem", self.tmem_columns, arch.tmem_columns, "columns"),
            ("threads", self.threads, arch.threads, "threads"),
            ("cluster", self.cluster, arch.cluster, "CTAs"),
            ("registers", self.registers, arch.registers, "a thread"),
        )
        over = [
            f"{name} {need} {unit} > {limit} {unit}"
            for name, need, limit, unit in limits
            if need is not None and need > limit
        ]
        return f"{', '.join(over)} ({arch.name})" if over else None


@dataclass(frozen=True)
class Cost:
    """A problem's unavoidable work: floating-point operations and bytes moved."""

    flops: float
    bytes: float


@dataclass(frozen=True)
class Artifact:
    """A compiled kernel in the artifact store.

    `key` is the compile key; `files` maps a role (``so``, ``ptx``, ``cubin``; ``library``
    for the entry of a library's function) to the SHA-256 of its content; `symbol` is the
    exported function's name in the ``so``.
    """

    key: str
    symbol: str
    files: Values
    footprint: Footprint = Footprint()
    facts: Values = Values()
    seconds: Values = Values()

    @property
    def role(self) -> str:
        """The role of the file that is loaded: ``so``, or ``library``."""
        return "library" if "library" in self.files else "so"


@dataclass(frozen=True)
class Environment:
    """Where a result was made. `None` is "not there" (no GPU) or "could not be read"."""

    gpu: str | None = None
    arch: str | None = None
    driver: str | None = None
    power_limit_w: float | None = None
    mig: str | None = None
    clocks_policy: str | None = None
    cuda: str | None = None
    cutlass_dsl: str | None = None
    tvm_ffi: str | None = None
    torch: str | None = None
    python: str | None = None
    tunekit: str | None = None


@dataclass(frozen=True)
class Winner:
    """The variant chosen for one problem bucket in one environment.

    `artifact` is the compile key that its kernel lies under in an artifact store (what
    dispatch looks for first; an outcome's `artifact` is a content's hash), `symbol` the function in it.
    `median_us` and `spread_us` are over the final's samples; `margin` is by how much the
    runner-up was slower in the same rounds (a ratio, minus 1); `confidence` is that of the
    test named by `method`, None where the final made no test or was not decided. `library` is the package
    and version whose function it is (``flash-attn-4 4.0.0b36``), empty for a compiled kernel.

    `outcome` is ``winner``, ``tie`` (it represents the variants in `tied`) or ``undecided``, empty where the
    record is older than that; `rounds` how many the decision took; `cases` how many verified it; `final`
    names the final whose trials hold the samples (their fact `final`), empty where none does.
    """

    variant: Variant
    problem: Values
    bucket: Values
    environment: Environment
    protocol: str
    artifact: str
    symbol: str
    median_us: float
    spread_us: float
    samples: int
    runner_up: str | None = None
    margin: float | None = None
    confidence: float | None = None
    method: str = "median"
    tied: tuple[str, ...] = ()
    source: str = "measured"
    library: str = ""
    outcome: str = ""
    rounds: int | None = None
    cases: int | None = None
    final: str = ""


class Level(str, Enum):
    """How dispatch found its choice, best first."""

    EXACT = "exact"
    BUCKET = "bucket"
    NEAREST = "nearest"
    SHIPPED = "shipped"
    DEFAULT = "default"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class Choice:
    """What dispatch picks for a problem, and why; `fell_back_from` lists what missed.

    `artifact` is the compile key of the kernel that serves, None where none is compiled.
    `better` is what would serve instead, were it compiled; None where nothing better is known.
    """

    variant: Variant
    level: Level
    why: str
    artifact: str | None
    symbol: str | None
    fell_back_from: tuple[str, ...] = field(default=())
    winner: Winner | None = None
    better: Variant | None = None


PLAIN_TYPES = frozenset((str, int, bool, type(None)))


def to_json(value: Any) -> Any:
    """Plain JSON of any value here: dataclasses become objects, NaN and inf are refused.

    Raises:
        ValueError: for NaN or infinity, which must never enter a record.
        TypeError: for what has no JSON form.
    """
    if type(value) in PLAIN_TYPES:  # most are, by the million
        return value
    if isinstance(value, Enum):
        return value.value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_json(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(name): to_json(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{value} can't be recorded")
    if isinstance(value, (int, float, str)):
        return value
    raise TypeError(f"{type(value).__name__} has no JSON form")
