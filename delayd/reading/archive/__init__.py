"""Archives: sealed hours as Parquet in a folder or an object store, each written once and proved by its seal
(docs/archive.md).

A map, from the place to the proof. `archiver.archive_directory` writes, `archive_audit.audit_archive` reads.

    store               where an archive lies: a folder, an object store
    notes               names of files, and the note beside each
    rows                what the files hold
    carried             keys, tags, headers and bodies in them
    pieces              an archived hour, some rows at a time
    archiver            sealed hours of a data directory, put into an archive
    archive_audit       the books of an archive
"""
