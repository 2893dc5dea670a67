"""What a kernel is launched with: recorded from its own host code, on a machine without a GPU."""
