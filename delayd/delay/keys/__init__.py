"""Keys: the index that says which row was the newest to take a key (docs/keys.md, docs/formats/keys.md).

A map, from the ground up.

    keyed           the rows of a batch that have a key
    entries         rows by the hash of their names; what the index holds, in memory or as a piece of a file
    run             a file of entries, sorted by hash
    index           all runs together: looking up, adding, what a checkpoint writes, merging
    taken_names     which row has taken a name, also while a look-up is under way
    owned_slots     which keys are this server's to judge

Words. A *name* is a subject and a key. An *entry* says which row took a name, and when that row is due. A *run* is a
sorted set of entries that never changes. The newest entry of a name is the one with the highest sequence.
"""
