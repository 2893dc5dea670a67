"""The parent's side of measuring stays light."""

from __future__ import annotations

import subprocess
import sys


def test_importing_measure_imports_no_torch():
    script = (
        "import sys, tunekit.measure, tunekit.measure.client, tunekit.measure.final\n"
        "heavy = {'torch', 'cutlass', 'cuda', 'tvm_ffi', 'numpy'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
