"""What the public API promises, wherever its messages live: the same cases for servers and for an open directory.

A home is an address that clients take; `homes` has them all. A case sends on a subject of its own, so cases share a
home. Who builds another home adds it to `homes.HOMES`, and all cases run there, too.
"""
