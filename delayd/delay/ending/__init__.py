"""Ending: rows that end because somebody asked for it, before they are due (docs/keys.md; rules C1, C2, P1).

A map, from a request to the outcome of its rows; what became of a row is asked of the ledger.

    finder              lists the pending rows of a subject and a window
    copies              what rows hold, gathered into one batch: for an answer, a move, or another delay server
    drain               rows that go to another delay server, until that server has taken them
    requested           which row stands for each message of a request, and what the caller is told of it
    message_requests    requests from their arrival to their answers, and what one group commit decides
    occurrences         what recurring schedules send and skip, computed from their carriers
    overlaps            whether a message of a schedule is unacknowledged, here or at a realtime server
    own_rows            due rows about which this server decides: carriers, and records of sends
    carriers            the rows that stand for recurring schedules: what is due of them, and what callers ask
    keyed_sends         batches with keys from their arrival to the verdicts about their rows
    endings             these parts, put together; requests by key, up to their rows
"""
