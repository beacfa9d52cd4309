"""Further cases of the public API, wherever its messages live, beyond those of `delayd.testing.conformance`.

A case sends on a subject of its own, so cases share a home. `homes` has all homes; another one that is added there has
all cases run against it, too.
"""
