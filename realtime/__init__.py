"""The realtime server: it keeps due messages and gives them to groups of consumers.

A map, in the order in which a message passes. Pages: docs/protocol.md (Realtime server), docs/handoff.md,
docs/formats/pull.md and consume.md. Rules: H (handoff), Q (consumers), L (logs), in docs/rules.md.

Around the core
    server              the process: files, sockets, threads and one timer; the end of what ephemeral groups left
    core                the parts below, wired together: requests in, answers out
    operators           requests of operators
A delay server hands a message over (H1 to H7)
    delay_servers       requests of delay servers; each frame is checked before it is kept, and so is free space
    handoff             which session of each delay server counts, and which batches are in doubt
    commit              the writers of the message log and of the pull log
    subject_index       from a message's number to its stored batch, and the batch itself
A consumer pulls and acknowledges it (Q1 to Q10)
    consumers           requests of consumers, checked; subscriptions are filled with groups
    subscriptions       many subjects at once: which of its groups have messages
    pulls               messages to consumers, acknowledgements and leases
    polls, answers      pulls that wait, and which messages an answer holds
    words               which messages an acknowledgement names, and which handles are valid
    groups              one group and its terms, which groups changed, and all groups by name
    group_records       groups begin, move, rest and end
    terms               where a group begins, and which messages of its subject it wants, by their tags
    group_window        where each message of a group is, and what moves it
    leads               which consumer of an exclusive group gets its messages
    order               which messages wait for others with their ordering key
    retries             messages that come again later, and dead letters (Q2); `delayd.net.courier` takes them away
    unfinished          which recurring schedules have messages that no group is done with
It may go (Q3)
    removal             which segments may be removed, and subjects that nobody pulls
A checkpoint and a start (L, P2)
    checkpoint          what a checkpoint holds, copied piece by piece; consume logs and one transaction
    kept                the values in LMDB
    recovery            rebuilds memory from the last checkpoint and the logs above it
What is damaged (L5, L9, L10)
    unreadable          messages that can't be read, by name
    unread              what a start could not read, taken by beginning anew in place; files that go under the server
    rebuild             consume logs made again

Words. An *origin* is a delay server. Its *window* holds its batches above W, the watermark: these may be in doubt
there, so they are remembered. A *life* of a server lasts from one start to the next. A *run* is a range of
neighbouring messages. A *handle* names pulled messages: the incarnation of the connection that pulled them, and pull
sequences. A consumer has *empty hands* when it holds no message that it could work on, and fetches *ahead* otherwise.
The *marks* of a checkpoint say how far it covers each log, and the *tail* of a consume log how far that log is valid.
"""
