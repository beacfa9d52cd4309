"""Logs on disk: files of checksummed groups, and each kind of log made of them (docs/formats; rules L).

A map, from the bytes up. Nothing here knows the network or the loop; disk and time are arguments.

    segment             one file of groups behind a file header; what a crash leaves is found and cut here
    group               what one group commit appends: a header and whole batches
    log                 ordered segments as one sequence of groups: append, read, recover, remove, watch
    committer           group commit: what arrives while the disk is busy becomes the next group
    control             records that a log keeps about itself, between batches of messages; limits of subjects
    key_run             a file of the index of keys, and the list of those that count
    checkpoint          the file that a server publishes for readers in other processes
The delay server's logs
    hour                the logs of an hour: paths, the outcome of each message, rows that decisions ended, seals
The realtime server's logs
    consume             the consume log of a subject: from a message's number to its place
    pull                the pull log: which consumer was given which messages, their outcomes, and their retries
What a person or a disk does to a log
    tail                tells a damaged end of a log from one that a crash has torn, and lets an operator give it up
"""
