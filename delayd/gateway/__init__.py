"""The gateway: HTTP for programs without a client of delayd (docs/gateway.md).

It is a client of the servers, like any other, and keeps nothing that must last. A map, from the socket inwards.

    program     one process: the socket, signals, the ready line
    connection  one caller: limits of time and size for what is not yet a request
    front       each request on its way to its route: foreign pages, callers, errors; one write for each answer
    app         what is asked of which part
    sends       a body of a request becomes messages, and receipts become an answer
    keeping     messages of a list or a stream are sent as columns, and those of one key in their order
    streams     the two forms of a stream: rows of a request as they come, and their answers
    once        requests with a name of their own, which are done once
    messages    what became of a message; cancel and move it; list what is pending
    traces      the life of a message, as far as servers tell it
    forecast    how many messages come due in each period
    callers     which callers may ask for what, by the cluster's tokens
    sessions    what the cookie of somebody who has signed in to the console holds
    groups      messages are pulled for a group, and held here under a name until they are settled
    shared_pull   callers who wait for one group share one pull, and what comes
    push        due messages are POSTed to the targets that meta has (docs/push.md)
    pusher      one target: pulled, POSTed, settled
    pacing      how often a target is asked, and when it is left alone
    caller      one POST to whoever was named, and which addresses may be asked
    signing     signatures of POSTs
    push_routes   targets over HTTP
    cron_routes   recurring schedules over HTTP
    conditions  If-Match and If-None-Match: what a request requires of what it changes
    clock       the clock of servers in memory, which tests move
    admin       what operators ask and decide: subjects, groups, dead letters, quotas
    operations  the table of all that may be asked
    openapi     the document that is made from that table
    console     pages for people, at / (docs/console.md)
    values      JSON in and out: what each request may have, and its bounds
    problems    errors as problem+json
    metrics     what Prometheus reads
"""
