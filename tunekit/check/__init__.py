"""The check of compile times: limits, a baseline, and a verdict that a noisy runner doesn't change."""
