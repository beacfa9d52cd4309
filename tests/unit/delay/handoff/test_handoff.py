"""The handoff, seen from the delay server: sessions, windows, W, and what is sent again (rules H1 to H7)."""

from tests.unit.delay.handoff import cable_of, link_of, put_on_cable, ready_world, target_of


def test_rule_H2_undecided_batches_are_bounded_in_frames_and_in_bytes() -> None:
    world = ready_world(frame_rows_max=2, frames_in_flight_max=3)
    put_on_cable(world, 20)
    assert len(cable_of(world).up) == 3
    bytes_of_one = link_of(world).sender.window.size_bytes // 3
    small = ready_world(frame_rows_max=2, frame_bytes_max=100, frames_in_flight_max=8, undecided_bytes_max=800)
    put_on_cable(small, 20)
    assert 0 < len(cable_of(small).up) < 8
    assert link_of(small).sender.window.size_bytes < 800 + bytes_of_one


def test_an_answer_makes_room_and_the_next_frame_leaves_at_once() -> None:
    world = ready_world(frame_rows_max=2, frames_in_flight_max=1)
    put_on_cable(world, 6)
    cable = cable_of(world)
    cable.carry_up()
    target_of(world).sync()
    assert not cable.up
    cable.carry_down()
    assert len(cable.up) == 1
