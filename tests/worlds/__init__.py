"""Worlds: everything that a test needs around one server, in memory and step by step; and bugs to plant there.

    delay             a delay server's core with its disk, state, clock and threads, and the network around it
    outside           what survives a crash of that server: the machine, the targets, the producer
    target            a realtime server as the delay server sees it: its side of the handoff, and the connections
    files             what a delay server's files say, read apart from its memory
    chaos             a random life of that server, from one seed
    realtime          a realtime server's core in memory, and peers that keep its answers
    dispatch_batches  DISPATCH batches for that server
    keys              the delay server's index of keys, with its checkpoints
    *_adapter         what judges ask of a server, by server: only these modules know its insides
    port_bugs         bugs that stand at a port: the disk, the state, the clock, the wire
    bugs              bugs to plant in a delay server; each takes one rule out
    realtime_bugs     bugs to plant in a realtime server that several kinds of tests must find
    executor          runs each job at once
    patches           what a planted bug is made of

Data passes as in production: `outside` holds the producer's batches, `delay` carries them to the core, and the core's
frames pass a `target.Cable`. The simulation (tests/simulation) puts these worlds together to whole clusters.
"""
