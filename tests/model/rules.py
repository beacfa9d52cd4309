"""The rules that the model can do without, and the configurations in which it is searched.

Each rule is a branch of the steps; removed, its configuration must show what goes wrong.
"""

from typing import NamedTuple

from tests.model.state import Budget, Configuration

CONFIGURATIONS = {
    # Two messages, one target: the delay server dies, twice.
    "delay": Configuration((0, 0), (0,), 1, Budget(delay_crashes=2, cuts=1)),
    # The target dies, twice, and refuses a frame.
    "target": Configuration((0, 0), (0,), 1, Budget(target_crashes=2, cuts=1, refusals=1)),
    # Either dies, and a connection breaks.
    "both": Configuration((0, 0), (0,), 1, Budget(delay_crashes=2, target_crashes=1, cuts=1)),
    # Three messages, so that frames with several batches and several frames are under way.
    "frames": Configuration((0, 0, 0), (0,), 1, Budget(cuts=1, refusals=1)),
    # Outcomes of one hour are durable before those of another, whose disk is full.
    "hours": Configuration((0, 0), (0,), 1, Budget(delay_crashes=1, target_crashes=1, cuts=1, full_disks=1)),
    # Two targets, neither noted: meta names one, and after a restart perhaps the other.
    "notes": Configuration((0,), (None,), 2, Budget(delay_crashes=1, target_crashes=1, cuts=1)),
    # Two subjects on two targets, and one listens where the other did.
    "addresses": Configuration((0, 1), (0, 1), 2, Budget(misdials=1, cuts=1)),
    # A relay keeps bytes under way though the target died.
    "relay": Configuration((0, 0), (0,), 1, Budget(delay_crashes=1, target_crashes=1, cuts=1), relay=True),
}

WIDE = {
    "wide-delay": Configuration((0, 0), (0,), 1, Budget(delay_crashes=2, cuts=2, full_disks=1)),
    "wide-both": Configuration((0, 0), (0,), 1, Budget(delay_crashes=2, target_crashes=2, cuts=1)),
    "wide-frames": Configuration((0, 0, 0), (0,), 1, Budget(delay_crashes=1, target_crashes=1, cuts=1, full_disks=1)),
    "wide-refusals": Configuration((0, 0, 0), (0,), 1, Budget(target_crashes=1, cuts=1, refusals=1)),
    "wide-notes": Configuration((0, 1), (None, None), 2, Budget(delay_crashes=1, cuts=1)),
    "wide-addresses": Configuration((0, 1), (0, 1), 2, Budget(delay_crashes=1, misdials=2, cuts=1)),
}
"""Up to a minute each: run by hand."""


class Rule(NamedTuple):
    """What holds, and the configuration that shows best why."""

    configuration: str
    text: str


RULES = {
    "H1_durable": Rule("delay", "W passes a batch only when its outcome is durable in D_h"),
    "H1_prefix": Rule("frames", "W ends the prefix of decided batches; it is not the highest decided one"),
    "H1_epochs": Rule("delay", "W is (0, 0) while anything of an earlier epoch is undecided"),
    "H2_until_w": Rule("delay", "T remembers a batch until W passes it, not until it is acknowledged"),
    "H2_rescan": Rule("both", "a restarted T derives the window from its log again"),
    "H3_epoch": Rule("delay", "every start of D has a new epoch, durable before its first hello"),
    "H3_fence": Rule("relay", "T takes frames only on the connection of the session heard last in this life"),
    "H3_sync": Rule("target", "T fsyncs before it answers a hello, also when it believes that nothing is dirty"),
    "H3_record": Rule("delay", "the window is answered when the hello's record is durable, behind all under way"),
    "H3_drop": Rule("delay", "frames of an older session that the disk does not have yet are dropped at a hello"),
    "H4_ask": Rule("target", "a session sends nothing before the window was answered"),
    "H4_durable": Rule(
        "delay", "a session sends nothing, and W counts on nothing, before the answer is durable in D_h"
    ),
    "H4_known": Rule("delay", "answered rows that have an outcome already are ignored"),
    "H4_take_back": Rule("target", "what was sent and the answer does not name waits again"),
    "H5_noted": Rule("notes", "the target of a subject is durable in M before the first batch leaves"),
    "H5_wait": Rule("target", "rows that may be at T wait for its answer, not for the end of the connection"),
    "H6_never": Rule("target", "what is refused by name was never appended"),
    "H6_whole": Rule("frames", "a frame is taken or refused as a whole"),
    "H7_named": Rule("addresses", "a hello names the server that it is for, and another one refuses it"),
    "L1_outcomes": Rule("delay", "a restarted D fsyncs what it finds in D_h before it builds on it"),
    "L1_target": Rule("target", "a restarted T fsyncs what it finds in its log before it answers from it"),
    "L2_answer": Rule("both", "T acknowledges what is durable, not what is in the page cache"),
    "P4_outcomes": Rule("delay", "a restarted D takes the schedule minus the rows that D_h has"),
}

# Either of a pair may be missing, for the other does its work; not both.
PAIRS = [frozenset(("H3_sync", "L1_target"))]
