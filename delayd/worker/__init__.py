"""The worker: runs functions for messages, with retries, time limits and a clean stop (docs/worker.md).

A map, in the order in which a message passes.

    worker              Worker: its handlers, one run of all of them, and the signals that end it
    handler             one handler: what it is given, and how its bodies are decoded
    lane                pulls the messages of one handler, gives each a slot, and watches the time limit
    job                 one message in a slot: the middlewares around its handler, and the threads of functions
    verdicts            Retry and Reject; what becomes of a message, and how the server is told
"""
