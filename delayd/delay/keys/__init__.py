"""Keys: the index that says which row was the newest to take a key (docs/keys.md, docs/formats/keys.md).

A map, from the ground up.

    run             rows with keys, sorted by the hash of their names, in memory and as a file
    index           all runs together: looking up, also while rows come; adding, what a checkpoint writes, merging
    owned_slots     which keys are this server's to judge

Words. A *name* is a subject and a key. An *entry* says which row took a name, and when that row is due. A *run* is a
sorted set of entries that never changes. The newest entry of a name is the one with the highest sequence.
"""
