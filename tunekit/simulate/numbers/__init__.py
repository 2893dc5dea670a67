"""Arithmetic: number formats, IEEE operations with every rounding, and how instructions apply them to lanes."""
