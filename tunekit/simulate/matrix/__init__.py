"""How tensor-core instructions find a matrix in shared memory: descriptors and canonical layouts (pure functions)."""
