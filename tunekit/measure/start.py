"""The measuring child's beginning: ``tunekit.measure.start`` in a new interpreter.

It ties its life to the parent's before it imports anything heavy: torch takes seconds,
and a parent killed meanwhile must not leave it behind.
"""

from __future__ import annotations

import argparse

from tunekit.child import die_with_parent


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tunekit.measure.start")
    parser.add_argument("--device", required=True, help="CUDA device index, or host")
    parser.add_argument("--run-limit-s", type=float, required=True)
    parser.add_argument("--reply", type=int, required=True, help="file descriptor for replies")
    parser.add_argument("--life", type=int, required=True, help="file descriptor that closes with the parent")
    arguments = parser.parse_args()
    die_with_parent(arguments.life)
    from tunekit.measure.worker import serve

    serve(arguments.device, arguments.run_limit_s, arguments.reply)


if __name__ == "__main__":
    main()
