"""A witness of a log of hours: it cosigns checkpoints as C2SP says."""

from delayd.reading.tlog import COSIGNATURE, Checkpoint, Signer, parse_signatures, to_base64

WITNESS = Signer("witness.example/w1", bytes(range(32, 64)))
WITNESS_KEY = WITNESS.key._replace(kind=COSIGNATURE)


def cosigned(checkpoint: Checkpoint, at_s: int = 1_795_197_600) -> Checkpoint:
    """Add a witness's line, as C2SP says that it is made."""
    message = f"cosignature/v1\ntime {at_s}\n{checkpoint.body}"
    (line,) = parse_signatures(WITNESS.sign(message).rpartition("\n\n")[2])
    blob = WITNESS_KEY.id + at_s.to_bytes(8, "big") + line.signature
    (found,) = parse_signatures(f"\N{EM DASH} {WITNESS.name} {to_base64(blob)}\n")
    return checkpoint._replace(signatures=(*checkpoint.signatures, found))
