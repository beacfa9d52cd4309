"""The wire protocol without I/O: bytes in, frames and checked fields out (docs/protocol.md; rule E1 in docs/rules.md).

A map. Each answer is written and read by one file here, whoever asks for it.

    frame       one frame: a header, a head (a msgpack map), and a body of batches
    requests    each request, declared once: who serves it, to whom, and how large it may be
    heads       the fields of a head, errors as heads, and how many rows a head has room for
What heads say
    meta        servers, routes, moves and slots of keys, as meta knows them
    push        where gateways POST due messages to
    asked       which messages CANCEL, GET, FIND and DRAIN name, and the answer to each
    scheduling  what a delay server says: results of a SEND, quotas, targets
    recurring   recurring schedules: what a caller asks for, and what is stored
    once        records of sends that are done once
    consuming   what a realtime server says: subjects, groups, positions, stale handles
    tokens      what lets clients in, and what each may do
    status      what every server says of itself: what waits for an operator, and what it can't read
What Prometheus reads
    metrics     each metric, declared once, and how those of STATUS are made of it
    exposition  metrics as text
"""
