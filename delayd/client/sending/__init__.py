"""Sending: producers, from the caller's arguments to a receipt (docs/clients.md; rules I).

A map, in the order in which a message passes.

    options             what a caller may say of a send: declared, checked, and as columns
    producer            AsyncProducer, Producer, and what both have on a loop
    slots               how much may be under way
    outbox              messages that were sent and have no outcome yet
    unheard             sends that have failed and of which nobody has heard
    unsent, gathering, packing   single sends that share a batch; the bytes of a batch
    block               a piece of one `send_batch`
    groups              which delay server gets the next batch
    key_owners          which delay server judges which keys
    sender              numbers batches, sends them, and repeats them until their outcome is known
    place_asker         asks for the least loaded instants, for sends with ``spread``
    lives               where a message is now that a group gave back
    walker, pending     goes through all pending messages of a subject and a window; what it found, as pages
    message_asker, joined   cancel and move messages, and ask what became of them; single questions share a request
    receipt, rescheduled, send_future   what the caller gets back
"""
