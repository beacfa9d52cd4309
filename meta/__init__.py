"""The meta server: it knows which servers are alive and which of them serves a subject (docs/protocol.md, Meta).

A map, from the outside in.

    program, server   the process: the directory, the socket, requests in and answers out
    core              registrations and routes without I/O, kept in the state and served from memory
    registry          which servers there are, their leases, and which of them get no new messages
    routes            which realtime server has which subject
    push              where gateways POST due messages to
    tokens            what lets clients in, for all servers
    slots             which delay server owns which keys, and what a meta does that can't know all owners

Invariant: what meta has answered is durable, so it answers the same after a restart.
"""
