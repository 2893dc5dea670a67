"""Runs a compiled kernel's PTX on the CPU, with the launch that its own host code produced, and checks what it does."""
