"""An explicit-state model of keys, cancels and moves at a delay server (docs/keys.md), searched breadth first.

state       what the server, its disk, its target and its callers hold
decide      what the server decides about a request when it closes a commit
steps       what may happen next, and which faults
checks      what must hold in each state
rules       the rules that can be taken out, and the configurations
search      all states; the shortest way to a breach
"""
