"""The clients: producers and consumers, blocking and asynchronous (docs/clients.md; rules I and Q4 in docs/rules.md).

A map. `delayd/__init__.py` names what users import from here. Each client is written for the caller's event loop, and
its blocking form is made from that. Both share one core, which lives on one event loop of one process.

    producer            AsyncProducer, Producer, and what both have on a loop
    sending             what becomes of a send
    asking              questions to servers: about messages, and what operators ask
    admin               what operators ask of running servers, and decide
    pulling             consumers
All of them
    limits, instants    check what the caller said, and know what time it is at a server
    routing             which servers there are, the connection to each, and which of them gets what
    engine              what a client runs on, one a process (rule I2), its end with the program, and its blocking form
"""
