"""Read-only views of a data directory, live, stopped or copied (docs/reading.md, docs/audit.md; rules P3, S5 to S7).

A map, from the files to the verdict. `books.audit_directory` is where an audit begins.

What there is, and how it is read
    directory, word     which servers a directory holds; what their checkpoints say (*word*) and bound
    lives               which of them are up, and what a delay server has settled
    groups, indexed     the groups of logs: whole, without bodies, behind damage, or by index files
    columns             rows of many batches as flat arrays
The three logs of an hour
    schedule            the schedule side: schedule log below the checkpoint, message log above it
    dispatch            the dispatch log, and decisions of the message log: outcomes that it does not have yet
    realtime            what the realtime servers hold
The audit of an hour
    plan                what to read, in which order, in which parts
    join, audit         which rows belong together, what became of each, and messages that break the books
    findings, summary   the verdict on one hour: sentences, and figures
    acceptances         findings of an hour that an operator has looked into and accepts
What is more than one hour
    books               the audit of each hour, put together, and whether totals add up (S5)
    follow              whether the groups of a message log follow each other, up to its checkpoint and behind it (S5)
    seals               seals, verified from the files alone (S4)
    sides, side_lines   compares a delay server's outcomes with the tallies of realtime servers
    consumption         pull logs and consume logs
What users open
    data, cells         `delayd.open_data`: the files as tables of numpy columns, Arrow or pandas (docs/reading.md)
    scheduled           hours of one delay server, each message with what became of it
Other ways in
    verify, verify_file   each byte against its checksum
    find, matching      messages by what they say, also behind damage
    trace               one message through all logs
    tables, arrow, export   the logs, and what realtime servers sum up, as tables for other engines

Words. The *schedule side* of an hour are its rows in the schedule log and, above the checkpoint's replay offset, in
the message log. The *books* of an hour are its schedule side, its dispatch log and the rows at realtime servers
(*targets*). *Both sides* of a handoff are the delay server's dispatch log and the realtime servers' tallies. An
hour's rows are *settled* when each has an outcome or waits for a known reason. A delay server's *word* is the part of
its checkpoint that only an audit reads. A *torn* tail are the bytes behind the last group of a file that checks.
"""
