"""The pipeline end to end: expand, probe, compile, verify, measure, record."""

from tunekit.sweep.audit import audit
from tunekit.sweep.options import SweepOptions
from tunekit.sweep.run import sweep

__all__ = ["SweepOptions", "audit", "sweep"]
