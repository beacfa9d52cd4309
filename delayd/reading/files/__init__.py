"""The files of a data directory, read into columns; nothing is locked or changed (rules P3, L6).

A map, from names to rows.

    directory       which servers a directory holds, and what their checkpoints say (their *word*) and bound
    stored_groups   the groups of logs: whole, without bodies, behind damage; whether they follow each other
    row_arrays      rows of many batches as flat arrays; sorting them, and joining the rows of two logs
    origins         an hour at its delay server: schedule log, message log, dispatch log, and decisions
    items           keys, tags, headers and bodies of single rows
    target_index    the same hour at the realtime servers: an index of batches, and their rows
    stored_content  rows of realtime logs whose bytes are not what their content hash says
"""
