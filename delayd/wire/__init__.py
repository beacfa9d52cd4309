"""The wire protocol without I/O: bytes in, frames and checked fields out (docs/protocol.md; rule E1 in docs/rules.md).

A map. Each answer is written and read by one file here, whoever asks for it.

    frame               one frame: a header, a head (a msgpack map), and a body of batches
    limits, room        how large a request may be, and how many rows a head has room for
    requests            each request, declared once: who serves it, to whom, and with how much room
    heads               the fields of a head, and errors as heads
What heads say
    meta                servers, routes, moves and subjects, as meta knows them
    slots               which delay server owns which keys
    ending              which messages CANCEL and GET name, and the answer to each
    finding             pending messages of a subject and a window, a piece at a time
    drain               what leaves a delay server for another one, a piece at a time
    results             what became of each batch of a SEND
    positions           where a group begins, or is moved to
    stale               handles that a realtime server no longer holds, and why
    listings            subjects and groups of a realtime server
    quotas              what may be pending for a subject, and what is
    targets             realtime servers as a delay server sees them
    mend                what a server can't read
    status, waits       what every server says of itself, and what waits for an operator
"""
