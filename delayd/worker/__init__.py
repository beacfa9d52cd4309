"""The worker: runs functions for messages, with retries, time limits and a clean stop (docs/worker.md).

A map, in the order in which a message passes.

    worker              Worker: its handlers, and one run of all of them
    handler             one handler: what it is given, and how it is called
    decoding            bodies, from bytes to what a handler takes
    lane                pulls the messages of one handler, gives each a slot, and watches the time limit
    job                 one message in a slot
    blocking            its words, for functions in threads
    threads             the threads in which plain functions run
    middleware          what programs run around their handlers
    verdicts            Retry and Reject, and what becomes of a message
    settle              tells the server what became of messages
    signals             SIGTERM and SIGINT: the drain, and its end
"""
