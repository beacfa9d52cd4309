"""The asyncio shell around delayd.wire: connections, the listening side, and what every server does around its core.

A map. Page: docs/protocol.md. Rules: H8 (trust), B1 and B2 (budgets) in docs/rules.md.

A connection
    connection    one TCP connection, the same on both sides
    calls         what a connection has under way: requests without an answer, frames that are not sent
    endpoint      how an endpoint is dialled and listened on
    tls           what encrypts a connection, and who has the certificate for it
    inside        connections within one process, with no sockets
    entry         how a side that dials is let in: its token, its secret
    tokens        which tokens a server knows, and what each connection may ask for
    trust         both ends prove the cluster's secret; a server is the only one of its log_id
The listening side
    server        accepts connections and gives all of them one handler; the longest wait of its loop
    budget        how much of a server its peers may use, alone and together
A server's process, from its start to its end
    program       signals, the ready line, logging, exit codes, when garbage is collected
    held_start    a server whose start met damage waits here for its files
    admin         the HTTP port on which a server is measured
    machine       what a server has from its machine: disk, state, clocks, threads, secret
    home          lock, state, clock, threads and jobs of a server with logs
    registration  the server's line to meta
    courier       batches that live on at delay servers, until those have taken them
    cut           what its files hold at one moment, for a backup
    timer         the loop's timer
"""
