"""The clients: producers and consumers, blocking and asynchronous (docs/clients.md; rules I and Q4 in docs/rules.md).

A map. `delayd/__init__.py` names what users import from here. Each client is written for the caller's event loop, and
its blocking form is made from that. Both share one core, which lives on one event loop of one process.

    sending             producers
    pulling             consumers
    admin, ask          what operators ask of running servers, and decide; one question to a server that meta knows
All of them
    limits, instants    check what the caller said, and know what time it is at a server
    routing             which servers there are, the connection to each, and which of them gets what
    engine              what a client runs on, one a process (rule I2), and its end with the program
    blocking            how a blocking form is made from the asynchronous one, and its background thread
"""
