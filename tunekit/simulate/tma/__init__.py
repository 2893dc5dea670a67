"""Tensor maps (TMA descriptors) and the boxes that tensor copies move, from bits to byte addresses (pure functions)."""
