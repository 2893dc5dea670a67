"""What people and programs read: tables, failures grouped by reason, progress."""

from tunekit.report.audit_summary import print_audit
from tunekit.report.failures import FailureGroup, group_failures
from tunekit.report.printer import Printer, Table, is_plain
from tunekit.report.progress_display import progress_display
from tunekit.report.sweep_summary import print_sweep

__all__ = [
    "FailureGroup",
    "Printer",
    "Table",
    "group_failures",
    "is_plain",
    "print_audit",
    "print_sweep",
    "progress_display",
]
