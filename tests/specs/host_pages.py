"""A host kernel whose problem is mostly derived, with tensors of several forms and a workspace.

``host_pages``: y[b] = scale * (sum, or last, of the rows of sequence b); the rows of x lie in an array of `s` rows a
sequence, end to end (packed, with the first row of each in `starts`) or in pages that a table lists.
Split sums go through the workspace. ``host_pages_faulty``: the same, with a tunable `fault` in what is done with it.
"""

from __future__ import annotations

import itertools

from tunekit.spec import Axis, Constraint, Implementation, KernelSpec, ScalarArg, TensorArg, Tunable

SOURCE = """
#include "tunekit_host.h"

TUNEKIT_KERNEL(args, count) {
    if (count != 2 + (PAGE > 0) + PACKED + WINDOW + 1 + (SPLIT > 1)) return fail("wrong number of arguments");
    int next = 0;
    const float *x = data_arg(args, next++);
    const int32_t *table = PAGE ? data_arg(args, next) : 0;
    const int64_t columns = PAGE ? tensor_arg(args, next++)->shape[1] : 0;
    const int32_t *starts = PACKED ? data_arg(args, next++) : 0;
    const DLTensor *out = tensor_arg(args, next);
    float *y = data_arg(args, next++);
    const int64_t left = WINDOW ? (int64_t)scalar_arg(args, next++) : -1;
    const float scale = (float)scalar_arg(args, next++);
    float *scratch = SPLIT > 1 ? data_arg(args, next++) : 0;
    const int64_t batch = out->shape[0];
    const int64_t s = PAGE ? columns * PAGE : PACKED ? 0 : tensor_arg(args, 0)->shape[1];
    for (int64_t b = 0; b < batch; ++b) {
        const int64_t size = PACKED ? starts[b + 1] - starts[b] : s;
        const int64_t begin = LAST ? size - 1 : left < 0 || left >= size ? 0 : size - 1 - left;
        for (int part = 0; part < SPLIT; ++part)
            for (int64_t c = 0; c < COLS_OUT; ++c) {
                float sum = 0.0f;
                for (int64_t k = begin + part; k < size; k += SPLIT) {
                    const int64_t row = PAGE ? (int64_t)table[b * columns + k / (PAGE ? PAGE : 1)] * PAGE
                                                  + k % (PAGE ? PAGE : 1)
                                      : (PACKED ? starts[b] : b * s) + k;
                    sum += x[row * COLS + c];
                }
                if (SPLIT == 1) y[b * COLS_OUT + c] = scale * sum;
                else if (FAULT == 1) scratch[(b * SPLIT + part) * COLS_OUT + c] += sum;
                else if (FAULT == 3 && part == 1 && b == batch - 1) continue;
                else scratch[(b * SPLIT + part) * COLS_OUT + c] = sum;
            }
        if (SPLIT > 1)
            for (int64_t c = 0; c < COLS_OUT; ++c) {
                float sum = 0.0f;
                for (int part = 0; part < SPLIT; ++part) sum += scratch[(b * SPLIT + part) * COLS_OUT + c];
                y[b * COLS_OUT + c] = scale * sum;
            }
    }
    if (FAULT == 2) scratch[batch * SPLIT * COLS_OUT] = 0.0f;
    return 0;
}
"""
FAULTS = ("none", "adds_to_it", "past_its_end", "leaves_a_part")


def build(b):
    p = b.problem
    facts = {
        "COLS": p.cols,
        "COLS_OUT": p.cols_out,
        "PAGE": p.page,
        "PACKED": int(p.packed),
        "LAST": int(p.reduce == "last"),
        "WINDOW": int(p.reduce == "window"),
        "SPLIT": b.tunables.split,
        "FAULT": FAULTS.index(b.tunables.fault),
    }
    return "".join(f"#define {name} {value}\n" for name, value in facts.items()) + SOURCE


def lengths(p):
    """The rows of each sequence, as drawn: all of `s` while the packed rows last."""
    left = p.total
    for _ in range(p.batch):
        size = min(p.s, left) if p.packed else p.s
        left -= size
        yield size


def inputs(p, generator, device):
    import torch

    drawn = {}
    if p.page:
        chosen = torch.randperm(p.pages, generator=generator, device=device)[: p.batch * p.table_pages]
        drawn["table"] = chosen.to(torch.int32).reshape(p.batch, p.table_pages)
    if p.packed:
        drawn["starts"] = torch.tensor([0, *itertools.accumulate(lengths(p))], dtype=torch.int32, device=device)
    return drawn


def reference(p, given):
    import torch

    rows = given["x"].double()
    if p.page:
        sequences = [rows[given["table"][b].long()].reshape(-1, p.cols) for b in range(p.batch)]
    elif p.packed:
        starts = given["starts"].tolist()
        sequences = [rows[first:end] for first, end in itertools.pairwise(starts)]
    else:
        sequences = list(rows)
    if p.reduce == "last":
        sequences = [sequence[-1:] for sequence in sequences]
    if p.reduce == "window" and p.left >= 0:
        sequences = [sequence[-1 - p.left :] for sequence in sequences]
    return {"y": given["scale"] * torch.stack([sequence.sum(0)[: p.cols_out] for sequence in sequences])}


def spec_of(name, faults):
    return KernelSpec(
        name=name,
        version=1,
        axes=(
            Axis("batch", bucket="pow2", default=1, edges=(1, 3)),
            Axis("s", bucket="pow2", edges=(1, 24), default=lambda p: p.table_pages * p.page if p.page else None),
            Axis("cols", values=(4, 8), static=True),
            Axis("cols_out", values=(4, 8), static=True, default=lambda p: p.cols),
            Axis("reduce", kind="name", values=("sum", "last", "window"), static=True, default="sum"),
            Axis("left", minimum=-1, bucket="pow2", default=-1),
            Axis("page", values=(0, 8), static=True, default=0),
            Axis("table_pages", default=lambda p: -(-p.s // p.page) if p.page else 1),
            Axis("pages", default=lambda p: p.batch * p.table_pages if p.page else 1),
            Axis("packed", kind="flag", static=True, default=False),
            Axis("total", default=lambda p: p.batch * p.s),
        ),
        signature=(
            TensorArg(
                "x",
                ("batch", "s", "cols"),
                "float32",
                forms=((lambda p: p.page > 0, ("pages", "page", "cols")), (lambda p: p.packed, ("total", "cols"))),
            ),
            TensorArg("table", ("batch", "table_pages"), "int32", when=lambda p: p.page > 0),
            TensorArg("starts", ("batch + 1",), "int32", when=lambda p: p.packed),
            TensorArg("y", ("batch", "cols_out"), "float32", role="output"),
            ScalarArg("keep", default=lambda p: p.left, dtype="int32", when=lambda p: p.reduce == "window"),
            ScalarArg("scale", default=lambda p: 0.5),
        ),
        implementations=(
            Implementation(
                name="loop",
                requires={"host"},
                backend="host",
                tunables=(Tunable("split", (1, 2)), Tunable("fault", faults)),
                constraints=(
                    Constraint(
                        "scratch_fault", "the faults are in the scratch", lambda v: v.split > 1 or v.fault == "none"
                    ),
                ),
                build=build,
                workspace=lambda v, arch: v.batch * v.split * v.cols_out if v.split > 1 else 0,
                defaults=({"split": 1, "fault": "none"},),
            ),
        ),
        constraints=(
            Constraint("narrow", "cols_out can't exceed cols", lambda p: p.cols_out <= p.cols),
            Constraint("one_layout", "pages are not packed", lambda p: not (p.page and p.packed)),
            Constraint(
                "whole_pages", "s must be the table's pages", lambda p: not p.page or p.s == p.table_pages * p.page
            ),
            Constraint(
                "enough_pages", "the table needs as many", lambda p: not p.page or p.pages >= p.batch * p.table_pages
            ),
            Constraint("rows", "each sequence has 1 to s rows", lambda p: all(size > 0 for size in lengths(p))),
            Constraint("all_rows", "no row is left over", lambda p: p.total <= p.batch * p.s),
            Constraint("left_of_window", "left is of reduce=window", lambda p: p.left == -1 or p.reduce == "window"),
        ),
        reference=reference,
        inputs=inputs,
        examples=(
            {"s": 16, "cols": 8},
            {"batch": 2, "page": 8, "table_pages": 3, "cols": 8, "reduce": "window", "left": 9},
        ),
    )


host_pages = spec_of("host_pages", ("none",))
host_pages_faulty = spec_of("host_pages_faulty", FAULTS)
