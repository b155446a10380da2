"""A lease runs out unless it is renewed, and never comes back."""

from coattn.transfer.lease import Lease


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_it_runs_out_unless_it_is_renewed() -> None:
    clock = Clock()
    lease = Lease(2.0, clock)
    for _ in range(5):
        clock.now += 1.9
        assert not lease.over
        lease.renew()
    clock.now += 2.1
    assert lease.over


def test_who_slept_past_the_end_cannot_renew_it() -> None:
    clock = Clock()
    lease = Lease(2.0, clock)
    clock.now += 3
    lease.renew()  # the first thing that a process does which was stopped meanwhile
    assert lease.over
    clock.now = 100.0
    assert lease.over


def test_it_can_be_dropped() -> None:
    lease = Lease(600.0, Clock())
    lease.drop()
    lease.renew()
    assert lease.over
