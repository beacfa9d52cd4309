"""Handoff: due rows go to the realtime server of their subject, the *target* (rules H1 to H7; docs/handoff.md).

A map, in the order in which a row passes.

    dispatcher          gives due rows to the *link* (the connection) of their subject's target, also when that moves
    sender, frames      make frames of rows and follow each frame until its outcome is durable
    window              rows of one target that wait, which of its batches are not decided, and W
    link                the sessions with one target
    lateness            how late messages reached a target in the last seconds, for STATUS
    wire                the connection to it, and how its silence is noticed
What operators, meta and dispatch logs say about targets
    targets             what an operator sees of targets, and says of one that is lost or lost data
    target_words        what the state says of them: operators' decisions (*words*), how far each has acknowledged,
                        and which take this server for a restored one

Words. A *hello* is the first request of a session: it names this server, its epoch and its session; the target has
then *heard* this server. The *window* holds the batches of a target that are not decided, and W, the watermark, ends
the batches that are decided without a gap. The answer to a hello names the batches above W that the target holds. The
*named offset* is the highest place in the target's log that our dispatch logs name. The *fence* keeps a server that
may be a copy from serving. docs/handoff.md walks each case.
"""
