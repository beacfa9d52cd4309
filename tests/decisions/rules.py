"""The configurations that are searched, and the rules that can be taken out, each with one that shows its need."""

from typing import NamedTuple

from tests.decisions.state import Ask, Budget, State

CONFIGURATIONS = {
    "cancel": State((Ask.CANCEL, Ask.CANCEL_FIRST), Budget(crashes=2)),
    "cancel_counted": State((Ask.CANCEL,), Budget(crashes=2, checkpoints=1)),
    "replace": State((Ask.REPLACE, Ask.CANCEL), Budget(crashes=1, checkpoints=1)),
    "reject": State((Ask.SEND, Ask.SEND), Budget(crashes=1, checkpoints=1)),
    "move": State((Ask.MOVE, Ask.CANCEL), Budget(crashes=1, checkpoints=1)),
    "race": State((Ask.MOVE, Ask.REPLACE, Ask.CANCEL), Budget()),
    "merge": State((Ask.REPLACE, Ask.SEND), Budget(checkpoints=2, merges=1)),
    "full": State((Ask.REPLACE, Ask.CANCEL), Budget(full_disks=1)),
}


class Rule(NamedTuple):
    """What holds, and where it is needed."""

    text: str
    configuration: str


RULES = {
    "answer_durable": Rule("C1: an answer is given when its commit is durable", "cancel"),
    "claim_first": Rule("C1: a row is claimed before anything is appended", "cancel"),
    "in_flight": Rule("C1: a row that may have been sent in an earlier life is in flight", "cancel"),
    "undo": Rule("C1: a commit that the disk refuses gives its claims back", "full"),
    "one_group": Rule("P1: a decision and the new row are in one group", "replace"),
    "checkpoint_ended": Rule("C2: a checkpoint names the decisions whose outcomes are not durable", "cancel_counted"),
    "replay": Rule("P1: replay takes decisions from the log", "replace"),
    "replay_entries": Rule("C3: a start gives the index the rows above the checkpoint", "reject"),
    "refused_rows": Rule("C3: a row that was rejected does not take the key, also not at a start", "reject"),
    "compared": Rule("C3: what was looked up is compared with what came since", "reject"),
    "moved_to_run": Rule("C3: what came since may be in a new run already", "reject"),
    "effects_first": Rule("C3: a commit is in effect before the next one is decided", "reject"),
    "frozen_alone": Rule("C3: a checkpoint drops from memory only the entries that it wrote", "merge"),
    "index_newest": Rule("C3: the newest entry of a key wins", "merge"),
    "merge_newest": Rule("C3: a merge keeps the newest entry of a key", "merge"),
    "follower": Rule("C1: a moved row has its follower in the same group", "move"),
    "H4": Rule("H4: a start sends nothing before the target's window is answered", "cancel"),
}
