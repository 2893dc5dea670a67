"""Run in a process of its own: compiles what it is given as JSON, without a GPU, and prints the reports."""

from __future__ import annotations

import json
import sys

from tunekit.backends import entry

if __name__ == "__main__":
    print(json.dumps([entry.run(payload, lambda *_: None) for payload in json.loads(sys.argv[1])]))
