"""The delay server: it holds messages until they are due and hands each of them over once.

A map, in the order in which a message passes; each folder has a map of its own. Pages: docs/protocol.md (Delay
server), docs/handoff.md, docs/formats. Rules: L (logs), P (intake, replay, checkpoint), I (producers), H (handoff),
S (seals), in docs/rules.md.

Around the core
    program, server     the process: files, sockets, threads and one timer
    seal_hook           runs an operator's command with each new seal (docs/formats/seal.md)
    requests            turns frames into calls of the core, and outcomes into answers
    core                in which order the parts below work and stop; it does no I/O, and is called on the loop only
    parts               how they are put together: seven rooms, each made from those before it
A message comes in (I1, P1)
    producers           which batch numbers were accepted, so that a retried send is accepted once
    intake              makes batches durable in the message log, in group commits
    subjects            gives each subject a small number
    rows                verified batches as a few long columns, and pending rows: 32 bytes each in memory
    keys                the index of keys: which row was the newest to take a key (C3)
It passes through the folders
    filing              it is filed under its hour, in that hour's schedule log (P2 to P4)
    timers              it waits for its instant (P5, P7)
    handoff             it is handed over to the realtime server of its subject, the *target* (H1 to H7)
    books               its outcome is recorded, and its hour is sealed and deleted (S1 to S4)
    quotas              it counts for the quota of its subject (docs/quotas.md)
    ledger              whether it has ended, and whether a target may have it: the others ask here (C1, P7)
    ending              it ends before, because a caller cancels it; callers ask what became of it (C1, C2)
    reply               the one way out of a request: what it holds is given back, then it is answered
    standing            what the server says of itself: figures, what it waits for and refuses, whether it may leave
A start, and damaged files (L5, L9, L10)
    recovery            from a directory to all that is in memory
    kept_state, state_values   read the state; the values of it that several parts use
    quarantine          names files and values that can't be read, and has operators' decisions carried out
    damage              looks at damaged files until they are whole or given up, and takes them back at a start

Words. A *life* of a server lasts from one start to the next; each has a higher *epoch*. M is the message log, S_h and
D_h are the schedule log and the dispatch log of hour h; together they are the *books* of the hour. T is a realtime
server, called *target* here. A *note* is the durable record of the target of a subject. A *word* is an operator's
decision. A *decision* is a caller's: a group commit decides which rows a request ends. A row or a batch is *decided*
when its outcome is durable in D_h, and *in doubt* while nobody knows whether its target has it; a row has *ended* from
its decision on, or from its outcome. *Settled* means that all rows in question are decided. *Claimed* is the instant,
by this server's clock, at which a row was found due when its batch was made; a caller's request *claims* a row when it
ends it. docs/rules.md has the rules and letters, docs/handoff.md walks an example.
"""
