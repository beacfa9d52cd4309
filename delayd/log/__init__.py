"""Logs on disk: files of checksummed groups, and each kind of log made of them (docs/formats; rules L).

A map, from the bytes up. Nothing here knows the network or the loop; disk and time are arguments.

    segment             one file of groups behind a file header; what a crash leaves is found and cut here
    group               what one group commit appends: a header and whole batches
    log                 ordered segments as one sequence of groups: append, read, recover, remove
    committer           group commit: what arrives while the disk is busy becomes the next group
    control             records that a log keeps about itself, between batches of messages
    key_run             a file of the index of keys, and the list of those that count
    ended               rows that a delay server's decisions have ended
    checkpoint          the file that a server publishes for readers in other processes
The delay server's logs of an hour
    schedule            the schedule log: where its file is, and the table of hours in a checkpoint
    dispatch            the dispatch log: the outcome of each message
    seal                the seal log: one record for each sealed hour
    quota               the limits of a subject, as a delay server's state has them
The realtime server's logs
    consume             the consume log of a subject: from a message's number to its place
    pull                the pull log: which consumer was given which messages, and their outcomes
    retry               messages that a group finished with and that live on at their delay server
    tally, tallying     the tally log: counts the rows that were held of each delay server and hour
    segment_index       a closed segment without its bodies, for audits
What a person or a disk does to a log
    watch               notices files that are removed, replaced or cut under a running server
    proof               facts that tell a damaged end of a message log from one that a crash has torn
    give_up             lets an operator give up the damaged end of a log
"""
