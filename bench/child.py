"""``python -m bench.child SIZE CASE SIDE``: one run of one side in a process of its own; its figures as a JSON line.

So no run inherits the memory, the frozen objects or the connections of another one.
"""

import json
import sys

from bench.cases import cases
from bench.redis_peer import RedisMissing


def main() -> int:
    """Run what the command line names."""
    size, name, side = sys.argv[1:]
    case = next(case for case in cases(size) if case.name == name)
    try:
        print(json.dumps(case.sides[side]()))
    except RedisMissing as missing:
        print(json.dumps({"skipped": str(missing)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
