"""The realtime server: it keeps due messages and gives them to groups of consumers.

A map, in the order in which a message passes. Pages: docs/protocol.md (Realtime server), docs/handoff.md,
docs/formats/pull.md and consume.md. Rules: H (handoff), Q (consumers), L (logs), in docs/rules.md.

Around the core
    program, server     the process: files, sockets, threads and one timer
    core                the parts below, wired together: requests in, answers out
    peer                what the core needs of a connection
    operators, answers  requests of operators, and answers as heads
A delay server hands a message over (H1 to H7)
    delay_servers       requests of delay servers, checked
    handoff             which session of each delay server counts, and which batches are in doubt
    intake, reserve     checks a frame before it is kept; keeps a reserve of free space
    commit              the writers of the message log and of the pull log
    index, stored       from a message's number to its stored batch, and the batch itself
A consumer pulls and acknowledges it (Q1 to Q5)
    consumers           requests of consumers, checked
    pulls               messages to consumers, acknowledgements and leases
    group_records       groups begin, move, rest and end
    filters             which messages of a subject a group wants, by their tags
    leads               which consumer of an exclusive group gets its messages
    order               which messages wait for others with their ordering key
    positions, ephemeral   where a group begins, and groups that end with their last consumer
    subscriptions, joins   many subjects at once: which groups have messages, and which groups there are
    polls, parts        pulls that wait, and which messages an answer holds
    acks                which messages an acknowledgement names, and which handles are valid
    window              where each message of a group is, and what moves it
    groups, roster      one group and its terms, which groups changed, and all groups by name
    alarms              what parts do by the clock: tries, looks, the ends of leases
    retries             messages that come again later, and dead letters (Q2)
    farewell            ends what a group left at the delay servers that ended with its consumers
    retry_batch         these messages as the batch that their delay server takes; `delayd.net.courier` takes it there
It may go (Q3)
    retention           which segments may be removed, and subjects that nobody pulls
    closed, tally_log, segment_indexes   each closed segment is read once, counted and indexed
A checkpoint and a start (L, P2)
    snapshots           what a checkpoint holds, copied piece by piece
    checkpoint, kept    consume logs and one transaction; the values in LMDB
    recovery, pull_replay   rebuild memory from the last checkpoint and the logs above it
What is damaged (L5, L9, L10)
    quarantine, log_files   messages and files that can't be read, by name
    unread              what a start could not read; whole again, it is taken by beginning anew in place
    rebuild             consume logs made again

Words. An *origin* is a delay server. Its *window* holds its batches above W, the watermark: these may be in doubt
there, so they are remembered. A *life* of a server lasts from one start to the next. A *run* is a range of
neighbouring messages. A *handle* names pulled messages: the incarnation of the connection that pulled them, and pull
sequences. A consumer has *empty hands* when it holds no message that it could work on, and fetches *ahead* otherwise.
The *marks* of a checkpoint say how far it covers each log, and the *tail* of a consume log how far that log is valid.
"""
