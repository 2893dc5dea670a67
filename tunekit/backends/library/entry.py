"""A library's entry: the plain values from which any process makes the function again, as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tunekit.arch import parse_arch
from tunekit.backends.load import make
from tunekit.errors import TunekitError, words_of
from tunekit.model import Values, to_json
from tunekit.spec import Build, KernelSpec, load_spec
from tunekit.spec.packages import installed

FORMAT = 1


@dataclass(frozen=True)
class Entry:
    """Which function of which spec: `reference` is what ``load_spec`` takes, `static` the static problem axes.

    `library` is the package and the version that it was made with.
    """

    reference: str
    spec: str
    version: int
    implementation: str
    arch: str
    static: Values
    tunables: Values
    library: str

    def to_bytes(self) -> bytes:
        return json.dumps({"format": FORMAT, **to_json(self)}, indent=1, ensure_ascii=False).encode()

    @classmethod
    def of_bytes(cls, content: bytes) -> Entry:
        """The entry that `to_bytes` wrote.

        Raises:
            TunekitError: it is none of this version.
        """
        try:
            plain = json.loads(content.decode())
            if plain.pop("format") != FORMAT:
                raise ValueError("another format")
            static, tunables = Values(plain.pop("static")), Values(plain.pop("tunables"))
            return cls(static=static, tunables=tunables, **plain)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise TunekitError(f"it is no entry of a library: {words_of(error)}") from error

    def function(self, spec: KernelSpec | None = None) -> Callable[..., Any]:
        """The function, made again. `spec` is the spec that `reference` names, where it is loaded already.

        Raises:
            TunekitError: the package is not there, or of another version; or the spec changed; or build fails.
        """
        spec = spec or load_spec(self.reference)
        if (spec.name, spec.version) != (self.spec, self.version):
            raise TunekitError(f"it is for {self.spec} {self.version}, not for {spec.name} {spec.version}")
        implementation = spec.implementation(self.implementation)
        here = installed(implementation)
        if here and here != self.library:
            raise TunekitError(f"it was made with {self.library}, and {here} is installed")
        return make(implementation, Build(parse_arch(self.arch), self.static, self.tunables))
