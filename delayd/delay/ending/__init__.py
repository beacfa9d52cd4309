"""Ending: rows that end because somebody asked for it, before they are due (docs/keys.md; rules C1, C2, P1).

A map, from a request to the outcome of its rows; what became of a row is asked of the ledger.

    finder, contents    lists the pending rows of a subject and a window; what these rows hold
    leads               where receipts of moved messages have led
    moving              copies of messages that are to be moved to other instants
    drain               rows that go to another delay server, until that server has taken them
    pending_keys        how many rows with keys of some slots are pending
    message_requests    requests from their arrival to their answers
    taken_names         which row has taken a name, as of now
    keyed_requests      requests by key, up to their rows
    keyed_sends         batches with keys from their arrival to the verdicts about their rows
    endings             these parts, put together
"""
