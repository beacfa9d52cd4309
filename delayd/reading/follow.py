"""Follow: checks that the groups of a delay server's message log follow each other, and stand where its checkpoint says
(rule S5).

Invariant: nothing here stops an audit: each fault is a sentence.
"""

from delayd.log.control import LogTime, OperatorWord, SkippedSequences, decode_sound
from delayd.log.group import GroupKind
from delayd.log.schedule import RESTORED_STEP
from delayd.reading.groups import Group
from delayd.reading.word import Word


class Follow:
    """Checks that the groups of a message log follow each other, and stand where the checkpoint says (S5)."""

    def __init__(self, word: Word, replay_offset: int, appended_at_ms: int) -> None:
        """``appended_at_ms`` is the checkpoint's stamp of the last group below the replay offset."""
        self.faults: list[str] = []
        # The ids of everything that operators gave up, as `delayd mend` names them.
        self.given_up: set[str] = set()
        self.first = 0
        self.last_appended_at_ms = 0
        self._word = word
        self._replay_offset = replay_offset
        self._said_appended_at_ms = appended_at_ms
        self._next: int | None = None  # The sequence that the next row must have.
        self._appended_at_ms = 0
        self._crc32c: int | None = None
        self._epoch = 0
        self._end: int | None = None  # Where the group before ends.
        self._at_replay = False

    def take(self, group: Group, after: int) -> None:
        """Look at the next group; its rows end before the sequence ``after``."""
        header, at = group.header, f"the group at offset {group.header.offset}"
        if not self._at_replay and header.offset >= self._replay_offset:
            self._replay(header.previous_crc32c, header.offset)
        set_back = False
        if header.kind == GroupKind.CONTROL:
            for record in (record for _, batch in group.batches() for record in decode_sound(batch)):
                set_back |= isinstance(record, LogTime)
                if isinstance(record, SkippedSequences):
                    self._skip(at, record.sequences)
                elif isinstance(record, OperatorWord) and record.action == "drop":
                    self.given_up.add(record.id)
        if header.appended_at_ms < self._appended_at_ms and not set_back:
            self.faults.append(f"{at} was appended at {header.appended_at_ms}, before the one before it")
        if header.epoch < self._epoch:
            self.faults.append(f"{at} is of epoch {header.epoch}, the one before it of {self._epoch}")
        if header.kind == GroupKind.DATA:
            if self._next is not None and header.base_sequence != self._next:
                self.faults.append(f"{at} begins at sequence {header.base_sequence}, and {self._next} is the next one")
            if after - header.base_sequence != header.row_count:
                self.faults.append(f"{at} counts {header.row_count} rows, and has {after - header.base_sequence}")
            self.first = self.first or header.base_sequence
            self._next = after
        self._appended_at_ms, self._crc32c = header.appended_at_ms, header.header_crc32c
        self._epoch, self._end = max(self._epoch, header.epoch), group.end
        self.last_appended_at_ms = max(self.last_appended_at_ms, header.appended_at_ms)

    def end(self) -> None:
        """Check the end of the log."""
        if not self._at_replay:
            self._replay(None, self._end)

    def _skip(self, at: str, count: int) -> None:
        if count != RESTORED_STEP:
            self.faults.append(f"{at} leaves {count} sequences unused, an accepted server leaves {RESTORED_STEP}")
        elif self._next is not None:
            self._next += RESTORED_STEP

    def _replay(self, previous_crc32c: int | None, offset: int | None) -> None:
        """Compare the log with the checkpoint at the replay offset."""
        self._at_replay = True
        word = self._word
        if offset is not None and self._replay_offset not in (offset, self._end):
            self.faults.append(f"no group of the message log begins at the replay offset {self._replay_offset}")
        if self._next is not None and self._next != word.next_sequence:
            what = f"the message log goes on with sequence {self._next} at the replay offset {self._replay_offset}"
            self.faults.append(f"{what}, the checkpoint with {word.next_sequence}")
        if self._crc32c is not None and self._appended_at_ms != self._said_appended_at_ms:
            what = f"the last group below the replay offset was appended at {self._appended_at_ms}"
            self.faults.append(f"{what}, the checkpoint says {self._said_appended_at_ms}")
        if self._epoch > word.epoch:
            self.faults.append(f"the message log has a group of epoch {self._epoch}, the checkpoint is of {word.epoch}")
        before = self._crc32c if self._crc32c is not None else previous_crc32c
        if before is not None and before != word.replay_crc32c:
            self.faults.append("the checkpoint names another group below the replay offset than the message log has")
        self._next = word.next_sequence
