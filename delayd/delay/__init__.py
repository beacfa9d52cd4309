"""The delay server: it holds messages until they are due and hands each of them over once.

A map, in the order in which a message passes. Pages: docs/protocol.md (Delay server), docs/handoff.md, docs/formats.
Rules: L (logs), P (intake, replay, checkpoint), I (producers), H (handoff), S (seals), in docs/rules.md.

Around the core
    program, server     the process: files, sockets, threads and one timer
    requests            turns frames into calls of the core, and outcomes into answers
    core                the parts below, wired together; it does no I/O of its own and is called on the loop only
A message comes in (I1, P1)
    producers           which batch numbers were accepted, so that a retried send is accepted once
    intake              makes batches durable in the message log, in group commits
    subjects            gives each subject a small number
    table               reads many batches as a few long columns and makes pending rows of them
    rows                a pending row: 32 bytes in memory
    pending             rows that no checkpoint has filed yet
It is filed under its hour (P2 to P5)
    checkpoint          files, counts and publishes what the message log holds
    log_range           reads a stretch of the message log by columns
    schedule_writer     writes that stretch into the schedule logs of its hours
    hour_table          says up to where each schedule log is valid
It waits for its instant (P5, P7)
    loading, loader     read the coming hours, some minutes ahead
    wheel, hour_wheel, ready   the timers of all loaded hours, one hour, and its slots that are open
It is handed over (H1 to H7)
    dispatcher          gives what is due to the link of its subject's realtime server (the *target*)
    waiting             rows of one target that are due and not handed over
    sender, frames, sources   make frames of rows and follow each frame until its outcome is durable
    window              which batches of a target are not decided, and W
    link, watched_wire  the connection to one target and its sessions
    moves, targets, target_words, target_ends   what operators and dispatch logs say about targets
    refusers            targets that take this server for a restored one, which each start asks first
Its outcome is recorded, and its hour is closed (S1 to S4, S7)
    outcomes            writes the dispatch logs of the hours
    retention           seals hours whose books are complete, and deletes sealed hours when they are old
    sealing, seal_log   compare the two logs of an hour, and write its seal
    settled             the instant before which everything that fell due has an outcome
A start, and what is damaged (L5, L9, L10)
    recovery            from a directory to all that is in memory; `kept` reads the state, `earlier` the dispatch logs
    quarantine          what can't be read, by name; `held` keeps single rows of it
    mending, seal_mending   try quarantined hours and seal logs again until they are whole
    file_watch          notices files that someone removes or cuts
"""
