"""Batches of messages: the unit in which messages travel and rest.

    columns    the data model: columns, kinds of batches, and which columns each kind has
    batch      the bytes of one batch, read and made
    gather     rows of several batches, copied into a new one
    content    64-bit hashes over messages and over names
    names      subjects, patterns, and the limits of what a message may have
    labels     what a message carries beside its body: headers, tags, and what servers add when it comes again
    validate   what intake checks before it keeps a batch
    sequences  sorted arrays of sequences, and locations of rows in logs

Nothing here does I/O or knows a server. A whole batch is worked on by numpy; up to `columns.FEW_ROWS` rows a loop is
faster, and both ways give the same (tests/property/test_few_rows.py).
"""
