"""The old name of `tests.worlds.target`."""

import sys

from tests.worlds import target

# Reproductions that are kept outside this repository import the old name and patch what is in it, so it must be the
# same module and not a copy of its names. Nothing in this repository imports it.
sys.modules[__name__] = target
