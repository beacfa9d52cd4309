"""Read-only views of a data directory, live, stopped or copied (docs/reading.md, docs/audit.md; rules P3, S5 to S7).

A map, from the files to the verdict. `books.audit_directory` and `fleet.audit_fleet` are where an audit begins.

    files               the reader: files into columns
The audit
    plan                what to read, in which order, in which parts; who is up
    audit               one hour: which rows belong together, what became of each, and messages that break the books
    explanations        what may have kept messages, by the files of their servers
    subject_figures     messages of each subject by what became of them
    findings            the verdict on an hour: sentences, figures, and findings that an operator accepts
    books               the audit of each hour, put together, and whether totals add up (S5)
    fleet               one audit of directories of several machines, and of archives
    proved              sealed hours that an audit need not read again
    proofs, tlog        what shows an outsider what became of a message, and the trees and notes that it is made of
    seals               seals, verified from the files alone (S4)
    consumption         pull logs and consume logs
What else is asked
    find                messages by what they say, also behind damage
    trace               one message through all logs
    verify              each byte against its checksum
    tables, arrow       the logs, and what realtime servers sum up, as columns for other engines
    conditions          which rows of a table are wanted, and the hours that can have them
    views               tables of many directories and archives, in parts (docs/spark-tables.md)
    sql                 a query of DuckDB over these tables (`delayd sql`)
    data                `delayd.open_data`: hours and messages with what became of them (docs/reading.md)
    parquet, export     tables as files
    archive             sealed hours as files that outlive retention, and their audit (docs/archive.md)
    report              an audit as a page of HTML (docs/audit-report.md)

An hour's audit: `plan` bounds the files; for each hour (or part of one) `files.origins` reads its schedule side and
outcomes, `files.targets` the rows at realtime servers; `audit` sorts, joins and compares them; `books` adds up. A find
and a trace read the same groups and keep their places; an export writes the columns of the same plan.

Words. The *schedule side* of an hour are its rows in the schedule log and, above the checkpoint's replay offset, in the
message log. The *books* of an hour are its schedule side, its dispatch log and the rows at realtime servers
(*targets*). An hour's rows are *settled* when each has an outcome or waits for a known reason. A delay server's *word*
is the part of its checkpoint that only an audit reads. A *torn* tail are the bytes behind the last group of a file that
checks.
"""
