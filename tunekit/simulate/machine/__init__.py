"""What executes: clusters, CTAs, warps and their lanes, registers, memory, and the loop that runs them."""
