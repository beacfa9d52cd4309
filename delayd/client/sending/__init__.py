"""Sending: producers, from the caller's arguments to a receipt (docs/clients.md; rules I).

A map, in the order in which a message passes.

    options             what a caller may say of a send: declared, checked, and as columns
    producer            AsyncProducer, Producer, and what both have on a loop
    outbox              messages that were sent and have no outcome yet, and the bytes of their batches
    sender              numbers batches, sends them, and repeats them until their outcome is known
    asking              cancels and moves messages, asks what became of them, and for the least loaded instants
    walking             goes through all pending messages of a subject and a window, and through the lives of one
    receipts            what the caller gets back
"""
