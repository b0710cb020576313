"""Which source a lane draws from next: an exact weighted mixture with one number of state per source.

``credit`` of a source is what its share owes it, in tokens or samples: the integral of its share over the
amount T drawn, less what it gave. Think of a fluid server that gives all sources their shares at once: the
next sample of a source is *begun* where the fluid has given all samples before it (``credit >= 0``) and
*finished* where it has given this one too. Of the begun ones the first to finish is drawn, ties by name. The
rule is WF2Q (worst-case fair weighted fair queueing, Bennett and Zhang 1996); with sizes of one it is
Tijdeman's (chairman assignment, 1980).

**Bound.** With constant shares, at every draw, M the largest size met: ``-M <= credit <= M``, for any number
of sources. Below: what is drawn had a credit of at least 0, and loses at most its size. Above: look at a
sample of size s, finished by the fluid at d, that waits. Let q, of size L, be the last sample drawn before it
that finishes later than d, at T = t (or none: t = 0, L = 0). At t no waiting sample that finishes by d was
begun, else it had been drawn. So all that were drawn since are begun after t and finished by d: the fluid
gives them within d - t, and they and q are done by t + L + (d - t) = d + L. The sample is one of them, so it
waits until d + L - s at most, where its credit is at most ``s + share * (L - s) <= max(s, L) <= M``.

**Changing shares.** Credits carry over, so nothing is lost or given twice, and by the argument above no
source is ever more than one sample ahead, whatever the shares do. It can be further behind. How much a step
draws is known only when it is full, so the shares to come are unknown, and no rule can then promise one
sample: of six equal sources of unit samples three are owed 1/2 after three draws; if the next step gives
these all the weight, the last of them is owed 7/6 two draws later. (In general every rule loses the logarithm
of the number of sources S: cup game, Adler et al. 2003.) As credits sum to 0, ``credit <= (S - 1) * M``: one
sample for two sources. A search over shares that change at every draw found 1.7 M for four and 2 M for eight;
schedules over hundreds of steps whose weights differ by less than a factor of 20 stayed within M.
"""

from __future__ import annotations

import math
from collections.abc import Sequence


class Draw:
    """Credits of one lane, and its choice of the next source.

    ``set_shares`` must come first. It also counts T from 0 again, so that rounding does not grow with the
    run; called at every step, a lane that was saved there continues with the same bits.

    Args:
        credit: By source: what it is owed, as ``credit`` gave it; zeros for a new lane.
    """

    def __init__(self, credit: Sequence[float]) -> None:
        # Where shares are set: the amount drawn since, and where on it the fluid begins the next sample of
        # each source. Charging a draw then touches one source, not all.
        self._credit = [float(value) for value in credit]
        self._drawn = 0.0
        self._shares: tuple[float, ...] = ()
        self._starts: list[float] = []
        self._choices: list[tuple[int, float]] = []

    @property
    def credit(self) -> list[float]:
        """What each source is owed, in the unit of the sizes; JSON-plain."""
        if not self._shares:
            return list(self._credit)
        return [
            share * (self._drawn - start) if share > 0.0 else 0.0
            for share, start in zip(self._shares, self._starts, strict=True)
        ]

    def set_shares(self, shares: Sequence[float]) -> bool:
        """Draw by these shares from here on; return whether all credits start again from zero.

        A source without a share keeps no credit: where it owes or is owed something, all credits start again
        from zero, and the bound holds from there.

        Args:
            shares: By source, each at least 0; they sum to 1, or are all 0 where nothing can be drawn.
        """
        credit = self.credit
        starts_again = any(owed != 0.0 and share <= 0.0 for owed, share in zip(credit, shares, strict=True))
        if starts_again:
            credit = [0.0] * len(credit)
        self._shares = tuple(shares)
        self._drawn = 0.0
        self._starts = [
            -owed / share if share > 0.0 else 0.0 for owed, share in zip(credit, shares, strict=True)
        ]
        self._choices = [(index, share) for index, share in enumerate(shares) if share > 0.0]
        return starts_again

    def next(self, sizes: Sequence[int]) -> int | None:
        """Return the source to draw from; None if no source has a share.

        Args:
            sizes: Size of the next sample of every source; any value where its share is 0.
        """
        drawn, starts = self._drawn, self._starts
        chosen: int | None = None
        first = math.inf
        for index, share in self._choices:
            start = starts[index]
            if start <= drawn:
                finish = start + sizes[index] / share
                if finish < first:
                    chosen, first = index, finish
        if chosen is None and self._choices:
            # Credits sum to 0, so one of them is not negative but by rounding.
            return max(self._choices, key=lambda choice: (drawn - starts[choice[0]]) * choice[1])[0]
        return chosen

    def charge(self, source: int, size: float) -> None:
        """Book a draw of ``size`` from ``source``, which has a share; or part of a sample when it begins."""
        self._starts[source] += size / self._shares[source]
        self._drawn += size
