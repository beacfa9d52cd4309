"""The meta server: it knows which servers are alive and which of them serves a subject (docs/protocol.md, Meta).

A map, from the outside in.

    program, server     the process: the directory, the socket, requests in and answers out
    core                registrations and routes without I/O, kept in the state and served from memory
    registry            which servers there are, and their leases
    routes              which realtime server has which subject
    cordons             which delay servers get no new messages, and which left for good
    slots               which delay server owns which keys
    members             which delay servers may own keys, and what a meta does that can't know them all
"""
