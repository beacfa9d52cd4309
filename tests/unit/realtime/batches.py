"""The old name of `tests.worlds.dispatch_batches`."""

import sys

from tests.worlds import dispatch_batches

# Reproductions that are kept outside this repository import the old name and patch what is in it, so it must be the
# same module and not a copy of its names. Nothing in this repository imports it.
sys.modules[__name__] = dispatch_batches
