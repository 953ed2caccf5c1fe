"""Where every byte is: by tier (device, host, disk) and owner (a unit, or one of the runtime's)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple, get_args

from modelopt_lite.errors import InternalError

Tier = Literal["device", "host", "disk"]
TIERS: tuple[Tier, ...] = get_args(Tier)

RESIDENT = "resident"  # weights that never leave the device
BLOCKS = "blocks"  # slots that units share
STAGING = "staging"  # pinned memory between disk and device


class Account(NamedTuple):
    """Bytes of one owner in one tier."""

    tier: Tier
    owner: str


class LedgerRow(NamedTuple):
    """One line of the report: bytes now, and the most that there were at once."""

    tier: Tier
    owner: str
    nbytes: int
    peak: int


class Ledger:
    """Counts bytes; it never looks at memory itself, so that tests can hold it against a device.

    An owner's weights may be in several tiers at once: a unit with its weights in host memory has
    them in "host" and its slot counts under `BLOCKS` in "device".
    """

    def __init__(self) -> None:
        self._now: dict[Account, int] = {}
        self._most: dict[Account, int] = {}
        self._totals: dict[Tier, int] = dict.fromkeys(TIERS, 0)
        self._peaks: dict[Tier, int] = dict.fromkeys(TIERS, 0)

    @classmethod
    def estimate(
        cls,
        units: Mapping[str, int],
        *,
        resident: int,
        blocks: Sequence[int] = (),
        kept: Mapping[str, int] | None = None,
        source: Literal["host", "disk"] = "host",
        staging: int = 0,
    ) -> Ledger:
        """Return what a plan will take in its steady state, before anything is loaded.

        Args:
            units: Bytes of each unit's weights.
            resident: Bytes of weights in no unit.
            blocks: Bytes of each slot.
            kept: Bytes of a unit that its strategy keeps on the device; a part of ``units``.
            source: Where the rest of each unit is between passes.
            staging: Bytes of pinned host memory that copies go through.

        Raises:
            InternalError: A negative count, a ``kept`` unit that is none, or one that keeps more
                than it has.
        """
        ledger = cls()
        kept = kept or {}
        if unknown := sorted(kept.keys() - units.keys()):
            raise InternalError(f"ledger: {unknown[0]!r} keeps bytes on the device but is no unit")
        ledger.add("device", RESIDENT, resident)
        ledger.add("device", BLOCKS, sum(blocks))
        ledger.add("host", STAGING, staging)
        for name, nbytes in units.items():
            ledger.add("device", name, kept.get(name, 0))
            ledger.add(source, name, nbytes - kept.get(name, 0))
        return ledger

    def add(self, tier: Tier, owner: str, nbytes: int) -> None:
        """Count bytes that came to be.

        Raises:
            InternalError: A negative number, or no such tier.
        """
        account = self._account(tier, owner, nbytes)
        self._now[account] = self._now.get(account, 0) + nbytes
        self._most[account] = max(self._most.get(account, 0), self._now[account])
        self._totals[tier] += nbytes
        self._peaks[tier] = max(self._peaks[tier], self._totals[tier])

    def remove(self, tier: Tier, owner: str, nbytes: int | None = None) -> None:
        """Count bytes that ceased to be; None: all that the owner has in the tier.

        Raises:
            InternalError: More than there are.
        """
        account = self._account(tier, owner, nbytes or 0)
        held = self._now.get(account, 0)
        gone = held if nbytes is None else nbytes
        if gone > held:
            raise InternalError(
                f"ledger: {owner!r} gives back {gone} bytes of {tier} memory but has {held}"
            )
        self._now[account] = held - gone
        self._totals[tier] -= gone

    def move(self, source: tuple[Tier, str], target: tuple[Tier, str], nbytes: int) -> None:
        """Count bytes that changed tier or owner.

        Within a tier they are never counted twice. Between tiers each tier's peak is its own, so
        the moment in which both hold the bytes is in both peaks.

        Raises:
            InternalError: More than there are at ``source``.
        """
        self.remove(source[0], source[1], nbytes)
        self.add(target[0], target[1], nbytes)

    def total(self, tier: Tier) -> int:
        """Return the bytes in a tier."""
        return self._totals[tier]

    def peak(self, tier: Tier) -> int:
        """Return the most bytes that the tier has held at once since the last `reset_peaks`."""
        return self._peaks[tier]

    def reset_peaks(self) -> None:
        """Let peaks start from what is held now, as before a pass that is to be measured."""
        self._now = {account: nbytes for account, nbytes in self._now.items() if nbytes}
        self._most = dict(self._now)
        self._peaks = dict(self._totals)

    def held(self, owner: str) -> dict[Tier, int]:
        """Return an owner's bytes by tier, tiers without any left out."""
        return {
            tier: nbytes for tier in TIERS if (nbytes := self._now.get(Account(tier, owner), 0)) > 0
        }

    def report(self) -> list[LedgerRow]:
        """Return a row for every owner that has, or had, bytes: by tier, then first seen first."""
        return [
            LedgerRow(*account, self._now.get(account, 0), peak)
            for tier in TIERS
            for account, peak in self._most.items()
            if account.tier == tier and peak
        ]

    @staticmethod
    def _account(tier: Tier, owner: str, nbytes: int) -> Account:
        if tier not in TIERS or nbytes < 0:
            raise InternalError(f"ledger: {nbytes} bytes of {owner!r} in tier {tier!r}")
        return Account(tier, owner)
