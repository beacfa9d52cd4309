"""The limits of a subject, and the shares that several delay servers have of them."""

from delayd.log.quota import NO_LIMITS, Limits


def test_the_shares_of_all_servers_add_up_to_the_limit() -> None:
    for servers in range(1, 6):
        for most in (0, 1, 4, 100, (1 << 63) - 1):
            shares = [Limits(pending=most, per_second=most).share(place, servers) for place in range(servers)]
            for column in (0, 1):
                parts = [share[column] for share in shares]
                assert sum(part or 0 for part in parts) == most
                assert max(part or 0 for part in parts) - min(part or 0 for part in parts) <= 1
            assert all(share.pending_bytes is None for share in shares)


def test_without_limits_there_are_none_to_share() -> None:
    assert NO_LIMITS.share(1, 3) == NO_LIMITS
