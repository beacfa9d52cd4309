"""Pulling: consumers, from a pull to an acknowledgement (docs/clients.md; rules Q).

A map, in the order in which a message passes.

    consume_options     what is consumed, and how
    consumer            AsyncConsumer, Consumer, and the messages that they give out
    consumer_core       what both have on a loop
    pull_lane           what is asked of one server over all tries and connections, and what its answer has
    source, many_source   one subject at its server, and many subjects at several
    stock               messages fetched ahead, how many that should be, and how many handlers have
    message             messages as columns, views of single ones, and what they were before they came again
    acks                what a consumer says of messages, gathered into requests
"""
