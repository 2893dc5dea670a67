"""Serving: pick the variant for a call by shape, dtype, layout and device, and call it."""
