"""One tcgen05.mma as it runs: operands read, multiplied, and D written in its data path layout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from tunekit.simulate.faults import FaultKind
from tunekit.simulate.history.order import Access
from tunekit.simulate.matrix.layout import Place
from tunekit.simulate.ptx.module import Instruction
from tunekit.simulate.units.tcgen05.address import show, split
from tunekit.simulate.units.tcgen05.arithmetic import Float64, accumulate, multiply
from tunekit.simulate.units.tcgen05.data_path import DataPath
from tunekit.simulate.units.tcgen05.instruction_descriptor import Shape
from tunekit.simulate.units.tcgen05.operands import Elements, Reader, cells, from_shared, from_tensor, scales
from tunekit.simulate.units.tcgen05.state import tensor

if TYPE_CHECKING:
    from tunekit.simulate.machine.cta import Cta
    from tunekit.simulate.machine.warp import Warp


@dataclass(frozen=True)
class Scaling:
    """Where the scale factors lie, how many each row has along K, and their type."""

    a: int
    b: int
    blocks: int
    type: str


@dataclass(frozen=True)
class Multiplication:
    """Everything that the operation needs, read at issue.

    ctas    the CTAs that it works on; each holds its rows of A and D and its share of B's columns
    a       a place in shared memory, or an address in tensor memory
    kept    bool[128 * len(ctas)]: lanes whose D stays as it is
    zero    bool[n]: columns of B that count as 0; shift: the first column of B that is used
    """

    warp: Warp
    instruction: Instruction
    ctas: tuple[Cta, ...]
    shape: Shape
    path: DataPath
    d: int
    a: Place | int | None
    b: Place
    accumulate: bool
    scale_d: int
    kept: NDArray[np.bool_] | None
    zero: NDArray[np.bool_] | None
    shift: int
    scaling: Scaling | None
    shared: Access
    tensor: Access

    def run(self) -> None:
        """Reads, multiplies and writes; what can't be read or written is reported and left out."""
        reader = Reader(self.warp, self.instruction, self.shared, self.tensor)
        self._check_lane(reader)
        b = self._b(reader)
        if b is None:
            return
        for number, cta in enumerate(self.ctas):
            self._run_in(reader, number, cta, b)

    def _b(self, reader: Reader) -> Float64 | None:
        """float64[n, k], negated and with zeroed columns."""
        shape = self.shape
        share = shape.n // len(self.ctas)
        bits = shape.kind.element_bits
        # Transposed, columns of B come in chunks of 16 bytes.
        rows = -(-(share + self.shift) * bits // 128) * 128 // bits if shape.b_major == "mn" else share + self.shift
        parts = []
        for cta in self.ctas:
            part = from_shared(reader, cta, self.b, rows, shape.k, Elements(shape.b_type, bits, shape.b_major), "B")
            if part is None:
                return None
            parts.append(part[self.shift : self.shift + share])
        b = parts[0] if len(parts) == 1 else np.concatenate(parts)
        if self.zero is not None:
            b = np.where(self.zero[:, None], 0.0, b)
        return -b if shape.negate_b else b

    def _a(self, reader: Reader, cta: Cta, lanes: NDArray[np.int64]) -> Float64 | None:
        """float64[rows, k] of this CTA, for the lanes of one part."""
        shape = self.shape
        bits = shape.kind.element_bits
        if isinstance(self.a, Place):
            a = from_shared(
                reader, cta, self.a, self.path.rows, shape.k, Elements(shape.a_type, bits, shape.a_major), "A"
            )
        elif self.a is not None:
            a = from_tensor(reader, cta, self.a, lanes, Elements(shape.a_type, bits, "k"))
        else:
            a = None
        return a if a is None or not shape.negate_a else -a

    def _run_in(self, reader: Reader, number: int, cta: Cta, b: Float64) -> None:
        path, shape = self.path, self.shape
        width = shape.n // path.parts
        factors = self._factors(reader, cta, width)
        a: Float64 | None = None
        for part in range(path.parts):
            lanes = path.lanes[part]
            if a is None or not isinstance(self.a, Place):
                a = self._a(reader, cta, lanes)
            if a is None:
                return
            left, right = a, b[part * width : (part + 1) * width]
            if self.scaling is not None:
                if factors is None:
                    return
                left = _scaled(left, factors[0][part])
                right = _scaled(right, factors[1][part])
            self._write(reader, number, cta, lanes, part, multiply(left, right))

    def _factors(self, reader: Reader, cta: Cta, width: int) -> tuple[list[Float64], list[Float64]] | None:
        """For each part, the scale factors of this CTA's rows and of the part's columns."""
        s = self.scaling
        if s is None:
            return None
        parts, shape = self.path.parts, self.shape
        a = scales(reader, cta, s.a, self.path.rows, s.blocks, shape.scale_a_id, s.type, 1, "scale_A")
        b = scales(reader, cta, s.b, width, s.blocks, shape.scale_b_id, s.type, parts, "scale_B")
        return None if a is None or b is None else (a * parts, b)

    def _write(
        self, reader: Reader, number: int, cta: Cta, lanes: NDArray[np.int64], part: int, product: Float64
    ) -> None:
        lane, column = split(self.d)
        kept = None
        if self.kept is not None:
            kept = self.kept[128 * number : 128 * (number + 1)][lanes + lane]
            if kept.all():
                return
            if not kept.any():
                kept = None
        if kept is not None:
            lanes, product = lanes[~kept], product[~kept]
        rows, columns, touched = cells(lanes.tobytes(), lane, column, product.shape[1])
        state = tensor(cta)
        problem = state.trouble(lane, int(lanes[-1]) + 1, columns)
        if problem is not None:
            reader.fault(FaultKind.TMEM_ACCESS, f"D at {show(self.d)} ({self.shape}): {problem}")
            return
        before = state.memory.read(rows, columns, touched, self.tensor) if self.accumulate else None
        shape = self.shape
        result = accumulate(product, before, shape.d_type, self.scale_d, shape.saturate)
        state.memory.write(rows, columns, result, touched, self.tensor)

    def _check_lane(self, reader: Reader) -> None:
        """The lane that D, and A in tensor memory, may start in (9.7.16.10.5)."""
        allowed = (0, 16) if self.path.layout == "F" else (0,)
        lane = split(self.d)[0]
        if lane not in allowed:
            reader.fault(FaultKind.TMEM_ACCESS, f"D at {show(self.d)}: layout {self.path.layout} starts in {allowed}")
        if isinstance(self.a, int) and split(self.a)[0] != lane:
            reader.fault(FaultKind.TMEM_ACCESS, f"A at {show(self.a)} and D at {show(self.d)} start in different lanes")


def _scaled(matrix: Float64, factors: Float64) -> Float64:
    """matrix[rows, k] with each block along k times its factor[rows, blocks]."""
    rows, k = matrix.shape
    blocks = factors.shape[1]
    product: Float64 = (matrix.reshape(rows, blocks, k // blocks) * factors[:, :, None]).reshape(rows, k)
    return product
