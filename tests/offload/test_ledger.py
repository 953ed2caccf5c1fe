"""The ledger: bytes by tier and owner, peaks, and what a plan would take."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from modelopt_lite.errors import InternalError
from modelopt_lite.offload.ledger import BLOCKS, RESIDENT, STAGING, TIERS, Ledger, Tier


def test_bytes_go_through_the_tiers() -> None:
    ledger = Ledger()
    ledger.add("disk", "layers.0", 100)
    ledger.move(("disk", "layers.0"), ("host", "layers.0"), 60)
    ledger.add("device", BLOCKS, 40)
    assert ledger.held("layers.0") == {"host": 60, "disk": 40}
    assert ledger.held("layers.1") == {}
    ledger.remove("host", "layers.0")
    ledger.remove("disk", "layers.0", 10)
    assert [ledger.total(tier) for tier in TIERS] == [40, 0, 30]
    assert [ledger.peak(tier) for tier in TIERS] == [40, 60, 100]
    assert [tuple(row) for row in ledger.report()] == [
        ("device", "blocks", 40, 40),
        ("host", "layers.0", 0, 60),
        ("disk", "layers.0", 30, 100),
    ]


def test_another_owner_in_the_same_tier_is_not_counted_twice() -> None:
    ledger = Ledger()
    ledger.add("device", RESIDENT, 100)
    ledger.move(("device", RESIDENT), ("device", "layers.0"), 100)
    assert ledger.peak("device") == 100
    assert ledger.held("layers.0") == {"device": 100}


def test_peaks_start_again() -> None:
    ledger = Ledger()
    ledger.add("host", "a", 100)
    ledger.add("host", "b", 10)
    ledger.remove("host", "a")
    ledger.reset_peaks()
    assert ledger.peak("host") == 10
    assert [row.owner for row in ledger.report()] == ["b"]


@pytest.mark.parametrize("source", ["host", "disk"])
def test_estimate(source: Tier) -> None:
    assert source != "device"
    ledger = Ledger.estimate(
        {"a": 100, "b": 200},
        resident=50,
        blocks=(120, 120),
        kept={"b": 80},
        source=source,
        staging=30,
    )
    assert ledger.total("device") == 50 + 240 + 80
    assert ledger.total("host") == 30 + (220 if source == "host" else 0)
    assert ledger.held("b") == {"device": 80, source: 120}
    assert ledger.held(STAGING) == {"host": 30}


def test_impossible_bookings_are_our_own_faults() -> None:
    ledger = Ledger()
    ledger.add("host", "a", 5)
    with pytest.raises(InternalError, match="gives back 6 bytes of host memory but has 5"):
        ledger.remove("host", "a", 6)
    with pytest.raises(InternalError, match="has 0"):
        ledger.move(("device", "a"), ("host", "a"), 1)
    with pytest.raises(InternalError, match="-1 bytes"):
        ledger.add("host", "a", -1)
    with pytest.raises(InternalError, match="tier 'tape'"):
        ledger.add("tape", "a", 1)  # type: ignore[arg-type]
    with pytest.raises(InternalError, match="no unit"):
        Ledger.estimate({}, resident=0, kept={"a": 1})
    with pytest.raises(InternalError, match="-1 bytes of 'a'"):
        Ledger.estimate({"a": 1}, resident=0, kept={"a": 2})
    assert ledger.total("host") == 5


class Bookings(RuleBasedStateMachine):
    """Random bookings against a list of single bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger()
        self.bytes: list[tuple[Tier, str]] = []
        self.most: dict[Tier, int] = dict.fromkeys(TIERS, 0)

    @rule(tier=st.sampled_from(TIERS), owner=st.sampled_from("ab"), count=st.integers(0, 9))
    def add(self, tier: Tier, owner: str, count: int) -> None:
        self.ledger.add(tier, owner, count)
        self.bytes += [(tier, owner)] * count

    @rule(data=st.data(), goal=st.tuples(st.sampled_from(TIERS), st.sampled_from("ab")))
    def move(self, data: st.DataObject, goal: tuple[Tier, str]) -> None:
        if self.bytes:
            source = data.draw(st.sampled_from(self.bytes))
            self.bytes.remove(source)
            self.bytes.append(goal)
            self.ledger.move(source, goal, 1)

    @rule(tier=st.sampled_from(TIERS), owner=st.sampled_from("ab"))
    def remove(self, tier: Tier, owner: str) -> None:
        self.ledger.remove(tier, owner)
        self.bytes = [each for each in self.bytes if each != (tier, owner)]

    @invariant()
    def agrees(self) -> None:
        for tier in TIERS:
            held = [owner for where, owner in self.bytes if where == tier]
            self.most[tier] = max(self.most[tier], len(held))
            assert self.ledger.total(tier) == len(held)
            assert self.ledger.peak(tier) == self.most[tier]
            rows = {row.owner: row.nbytes for row in self.ledger.report() if row.tier == tier}
            for owner in "ab":
                assert rows.get(owner, 0) == held.count(owner)
                assert self.ledger.held(owner).get(tier, 0) == held.count(owner)
        assert sum(row.nbytes for row in self.ledger.report()) == len(self.bytes)


TestBookings = Bookings.TestCase
