"""The asyncio shell around delayd.wire: connections, the listening side, and what every server does around its core.

A map. Page: docs/protocol.md. Rules: H8 (trust), B1 and B2 (budgets) in docs/rules.md.

A connection
    connection          one TCP connection, the same on both sides; `calls` are its unanswered requests
    inside              connections within one process, with no sockets
    writer              what one connection has written and not sent
    trust               both ends prove that they have the cluster's secret
The listening side
    server              accepts connections and gives all of them one handler
    bounds              how much of a server its peers may use
    budget, files       what connections may use together, and how many there may be
A server's process, from its start to its end
    program             signals, the ready line, logging, exit codes
    held_start          a server whose start met damage waits here for its files
    machine             what a server has from its machine: disk, state, clocks, threads, secret
    roles               whose folder it is: one of another role is refused
    home                lock, state, clock, threads and jobs of a server with logs
    registration        the server's line to meta
    courier             batches that live on at delay servers, until those have taken them
    membership          which cluster the server belongs to, and whether it is the only one of its log_id
    cut, hold           what its files hold at one moment, for a backup
    timer, loop_watch, collector, heap   the loop's timer, its longest wait, and when memory is given back
"""
