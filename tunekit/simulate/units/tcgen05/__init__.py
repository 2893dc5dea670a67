"""The fifth-generation tensor core (PTX ISA 9.7.16), a file a topic.

allocation            alloc, dealloc, relinquish_alloc_permit                 address, fragments   what they are made of
load_store            ld, st, wait between tensor memory and registers
copy                  cp from shared memory, shift
mma                   mma and mma.ws as they are issued                       instruction_descriptor, zero_columns
multiply              ... and as they run                                     data_path, operands, arithmetic
pipe, commit, fence   order: the queue, completion, other threads             state: what a CTA and a warp keep

Refused by name: sparse matrices, .ashift, K = 96 (sm_103). Accepted without effect: the collector's qualifiers.
"""
