"""Judging a kernel's outputs by its spec's oracle, wherever they were computed: on a device or in the simulator."""
