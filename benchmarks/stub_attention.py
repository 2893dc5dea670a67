"""`fmha`'s arguments and flags with a kernel that does nothing, for the CPU: what a call costs without its kernel."""

from __future__ import annotations

import dataclasses

from tunekit.spec import Implementation, load_spec

fmha = load_spec("fmha")
stub_attention = dataclasses.replace(
    fmha,
    name="stub_attention",
    implementations=(
        Implementation(
            name="nothing",
            requires={"host"},
            backend="host",
            tunables=(),
            defaults=({},),
            build=lambda b: '#include "tunekit_host.h"\nTUNEKIT_KERNEL(args, count) { return 0; }\n',
        ),
    ),
)
SPECS = [stub_attention]
del fmha  # it runs on no host
