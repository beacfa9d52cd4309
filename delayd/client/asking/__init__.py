"""Asking: questions to servers, from the caller's arguments to the joined answer (docs/keys.md, docs/admin.md).

A map.

    messages            a question as data; asks delay servers about messages, and follows those that moved
    walking             goes through all pending messages of a subject and a window, and through the lives of one
    push                where gateways POST due messages to: listed, changed
    recurring           recurring schedules: made, changed and read
    once                sends that are done once under a caller's name, and their first receipts read again
    looking             what all servers say of themselves, and what waits for an operator
    subjects            each subject, and the realtime server that has it
    ask                 what operators ask: one server that meta knows, or all of a role
    tokens              what lets clients in: listed, made, rotated, revoked
"""
