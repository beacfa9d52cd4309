"""Sending: a send, from the caller's arguments to a receipt (docs/clients.md; rules I).

A map, in the order in which a message passes.

    send_options        what a caller may say of a send: declared, checked, and as columns
    outbox              messages that were sent and have no outcome yet, and the bytes of their batches
    batch_sender        numbers batches, sends them, and repeats them until their outcome is known
    receipts            what the caller gets back
"""
