"""Pulling: consumers, from a pull to an acknowledgement (docs/clients.md; rules Q).

A map, in the order in which a message passes.

    words, lives        what a consumer says of messages, and what these were before they came again
    subjects, options   what is consumed, and how
    consumer            AsyncConsumer, Consumer, and the messages that they give out
    consumer_core       what both have on a loop
    source, many_source   one subject at its server, and many subjects at several
    pull_lane           the one PULL that is under way at a server
    presence, incarnations   a consumer that its server must not miss, and what it was on earlier connections
    stock, pace         messages fetched ahead, and how many that should be
    message             messages as columns, and views of single ones
    in_flight           how many messages handlers have at once
    lease_keeper        keeps leases alive while handlers work
    acks                acknowledgements, gathered into ranges
"""
