"""The clients: producers and consumers, blocking and asynchronous (docs/clients.md; rules I and Q4 in docs/rules.md).

A map. `delayd/__init__.py` names what users import from here. Each client has a blocking and an asynchronous form, and
both forms share one core, which lives on one event loop of one process.

Producers, in the order in which a message passes
    sync_producer       Producer: blocking, on a background thread
    producer            AsyncProducer: on the caller's own loop
    arguments, due_columns, instants, limits   check what the caller said, and turn wishes into due instants
    producer_core       what both forms share
    room, slots         how much may be queued and be under way
    outbox              what was sent and has no outcome yet
    gathering, packing, rows   single sends that share a batch; the bytes of a batch
    block               a piece of one `send_batch`
    groups              which delay server gets the next batch
    sender, retry       number batches, send them, and repeat them until their outcome is known
    receipt, send_future   what the caller gets back
Consumers, in the order in which a message passes
    sync_consumer       Consumer: blocking, on a background thread
    consumer            AsyncConsumer: on the caller's own loop
    consumer_core       what both forms share
    pull_lane           the one PULL that is under way
    stock, pace         what was fetched ahead, and how much that should be
    message             messages as columns, and views of single ones
    acks                acknowledgements, gathered into ranges
Both
    meta                which servers there are, as meta last said
    link                the connection to one server
    loop_thread         the background thread of the blocking forms; `own_loop` checks the loop of the others
    at_exit             what is still flushed when the program ends
"""
