"""The loss of an error: rho(t) of a distance t, and the weight that makes a weighted square of it.

    minimise  sum_i  w_i rho( dist(a_i, S) )

Iteratively reweighted least squares replaces rho, at the distances t_i reached, by the parabola that touches it
there and lies above it: weight rho'(t_i) / (2 t_i) times t^2, plus a constant (MESSI, appendix E.1, asks for these
losses; the parabola is Huber & Ronchetti, Robust Statistics, 2nd ed., section 7.8). Solving the weighted squares
then never raises the sum. Losses take *squared* distances, which is what is measured: ||a||^2 - ||Va||^2.

| loss | rho(t) | choose it |
| --- | --- | --- |
| ``Squared()`` | t^2 | noise alone; the SVD |
| ``Power(q)`` | t^q, 0 < q <= 2 | some rows lie far away; q = 1 needs no threshold |
| ``Huber(t0)`` | t^2 up to t0, then 2 t0 t - t0^2 | noise of known size and some rows beyond it |
| ``Truncated(t0)`` | min(t, t0) | gross outliers, which then do not count at all |

Thresholds are distances in the units of the matrix, or (``unit="median"``) multiples of the median distance of
the rows to the flats of a fit with ``Power(1)``: a rank that suits the data makes 3 medians a sensible choice.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Literal, Self, TypeAlias

import torch
from torch import Tensor

from kflats.common.errors import KflatsError
from kflats.numerics.rows import check_power

FLOOR = 1e-6
"""Squared distances below this share of the row's squared norm count as that share in weights: in float32
||a||^2 - ||Va||^2 is rounding there, and a row on the flat would else weigh more than all others together."""

Unit: TypeAlias = Literal["absolute", "median"]


class _Loss(ABC):
    """The base of all losses."""

    @property
    @abstractmethod
    def name(self) -> str:
        """As ``from_name`` reads it."""

    @property
    @abstractmethod
    def degree(self) -> float:
        """q of rho(s t) = s^q rho(t), where s multiplies a threshold, too."""

    @property
    def is_squared(self) -> bool:
        """Whether rho(t) = t^2, which an SVD minimises without iterations."""
        return False

    @property
    def is_relative(self) -> bool:
        """Whether the threshold is in medians, so that ``absolute`` comes before rho and weight."""
        return False

    @abstractmethod
    def rho(self, dist2: Tensor) -> Tensor:
        """rho of squared distances, elementwise."""

    @abstractmethod
    def weight(self, dist2: Tensor, norms2: Tensor | None = None, floor: float = FLOOR) -> Tensor:
        """rho'(t) / (2 t) at squared distances ``dist2`` (n,), each at least the share ``floor`` of the row's squared
        norm ``norms2`` (n,)."""

    @abstractmethod
    def stages(self) -> tuple[Loss, ...]:
        """The losses to fit one after the other, each from where the one before ended; the last has the values of this
        one.

        Losses that are not convex in t, and thresholds in medians, begin with ``Power(1)``.

        >>> Truncated(2.0).stages()
        (Power(q=1.0), Truncated(threshold=2.0, unit='absolute'))
        """

    def absolute(self, dist2: Tensor, norms2: Tensor | None = None, weights: Tensor | None = None) -> Self:
        """This loss with its threshold as a distance: medians become multiples of the median of sqrt(``dist2``).

        Args:
            dist2: (n,) squared distances to the flats that thresholds are measured by, floored as weights are.
            norms2: (n,) squared row norms, for the floor; rows of zeros, which lie on every flat, are left out.
            weights: (n,) rows of weight 0 are left out; the others count once.

        >>> Huber(2.0, "median").absolute(torch.tensor([1.0, 9.0, 100.0]))
        Huber(threshold=6.0, unit='absolute')
        """
        return self

    def scaled(self, factor: float) -> Self:
        """This loss for distances that are ``factor`` times as large: an absolute threshold times ``factor``."""
        return self

    def check_reach(self, weights: Tensor, norms2: Tensor) -> None:  # noqa: B027  # most losses reach everywhere
        """Refuse a threshold within which no row lies, so that no row has a weight.

        Args:
            weights: (n,) of the rows. norms2: (n,) squared row norms.

        Raises:
            KflatsError: all weights are 0, and some norms are not.
        """


@dataclass(frozen=True)
class Squared(_Loss):
    """rho(t) = t^2: all rows weigh the same.

    >>> Squared().rho(torch.tensor([4.0])).tolist()
    [4.0]
    """

    @property
    def name(self) -> str:
        """As ``from_name`` reads it."""
        return "squared"

    @property
    def degree(self) -> float:
        """2: a square."""
        return 2.0

    @property
    def is_squared(self) -> bool:
        """True."""
        return True

    def stages(self) -> tuple[Loss, ...]:
        """This loss alone."""
        return (self,)

    def rho(self, dist2: Tensor) -> Tensor:
        """rho of squared distances, elementwise."""
        return dist2.clamp_min(0.0)

    def weight(self, dist2: Tensor, norms2: Tensor | None = None, floor: float = FLOOR) -> Tensor:
        """1 everywhere."""
        return torch.ones_like(dist2)


@dataclass(frozen=True)
class Power(_Loss):
    """rho(t) = t^q for 0 < q <= 2; q = 1 is the sum of distances (l2,1). Below 1 it is not convex in t, and a fit
    keeps nearer to where it starts.

    Raises:
        KflatsError: q outside (0, 2].

    >>> Power(1).rho(torch.tensor([4.0, 0.0])).tolist()
    [2.0, 0.0]
    >>> Power(1).weight(torch.tensor([4.0])).tolist()
    [0.25]
    """

    q: float = 1.0

    def __post_init__(self) -> None:
        check_power(self.q, 2.0, "q")

    @property
    def name(self) -> str:
        """As ``from_name`` reads it."""
        return f"power {_short(self.q)}"

    @property
    def degree(self) -> float:
        """q."""
        return self.q

    @property
    def is_squared(self) -> bool:
        """True for q = 2."""
        return self.q == 2

    def stages(self) -> tuple[Loss, ...]:
        """For q < 1 ``Power(1)`` comes first; q = 2 is fitted as ``Squared()``."""
        if self.is_squared:
            return (Squared(),)
        return (Power(1.0), self) if self.q < 1 else (self,)

    def rho(self, dist2: Tensor) -> Tensor:
        """rho of squared distances, elementwise."""
        return dist2.clamp_min(0.0).pow(self.q / 2)

    def weight(self, dist2: Tensor, norms2: Tensor | None = None, floor: float = FLOOR) -> Tensor:
        """q/2 t^(q-2), t^2 at least the share ``floor`` of the row's squared norm; 0 for rows of zeros."""
        if self.is_squared:
            return torch.ones_like(dist2)
        weights = self.q / 2 * floored(dist2, norms2, floor).pow(self.q / 2 - 1)
        # Rows of zeros lie on every flat: weight 0, and not the floor's enormous one.
        return weights if norms2 is None else torch.where(norms2 > 0, weights, 0.0)


_LEAST = 1e-30  # thresholds and their reciprocals; farther out squares vanish and float32 has no such number


@dataclass(frozen=True)
class _Thresholded(_Loss):
    threshold: float
    unit: Unit = "absolute"

    def __post_init__(self) -> None:
        number = isinstance(self.threshold, int | float) and not isinstance(self.threshold, bool)
        if not number or not _LEAST < self.threshold < 1 / _LEAST:
            raise KflatsError(
                f"a threshold of {self.threshold!r} is not possible",
                cause=f"a threshold is a number between {_LEAST:g} and {1 / _LEAST:g}",
            )
        if self.unit not in ("absolute", "median"):
            raise KflatsError(f"a threshold has no unit {self.unit!r}", hint='"absolute" or "median"')

    @property
    def name(self) -> str:
        """As ``from_name`` reads it."""
        unit = " median" if self.unit == "median" else ""
        return f"{type(self).__name__.lower()} {_short(self.threshold)}{unit}"

    @property
    def is_relative(self) -> bool:
        """True for a threshold in medians."""
        return self.unit == "median"

    def absolute(self, dist2: Tensor, norms2: Tensor | None = None, weights: Tensor | None = None) -> Self:
        """As for other losses."""
        if not self.is_relative:
            return self
        counted = floored(dist2, norms2)
        alive = torch.ones_like(counted, dtype=torch.bool) if norms2 is None else norms2 > 0
        if weights is not None:
            alive &= weights > 0
        counted = counted[alive] if bool(alive.any()) else counted
        median = counted.median()
        nowhere = float(median) <= torch.finfo(counted.dtype).tiny  # rows of zeros: any threshold does
        return replace(self, threshold=self.threshold * (1.0 if nowhere else float(median.sqrt())), unit="absolute")

    def scaled(self, factor: float) -> Self:
        """As for other losses."""
        return self if self.is_relative else replace(self, threshold=self.threshold * factor)

    def _distance(self) -> float:
        if self.is_relative:
            raise KflatsError(
                f"the threshold of {self.name!r} is in medians of distances, which are not known here",
                hint="a threshold that is a distance",
            )
        return self.threshold


@dataclass(frozen=True)
class Huber(_Thresholded):
    """rho(t) = t^2 up to the threshold t0, 2 t0 t - t0^2 beyond: squared for noise, linear for outliers.

    Raises:
        KflatsError: a threshold that is not positive, or an unknown unit.

    >>> Huber(2.0).rho(torch.tensor([1.0, 9.0])).tolist(), Huber(2.0).weight(torch.tensor([1.0, 16.0])).tolist()
    ([1.0, 8.0], [1.0, 0.5])
    """

    @property
    def degree(self) -> float:
        """2: a square."""
        return 2.0

    def stages(self) -> tuple[Loss, ...]:
        """For a threshold in medians ``Power(1)`` comes first."""
        return (Power(1.0), self) if self.is_relative else (self,)

    def rho(self, dist2: Tensor) -> Tensor:
        """rho of squared distances, elementwise."""
        t0 = self._distance()
        dist2 = dist2.clamp_min(0.0)
        return torch.where(dist2 <= t0 * t0, dist2, 2 * t0 * dist2.sqrt() - t0 * t0)

    def weight(self, dist2: Tensor, norms2: Tensor | None = None, floor: float = FLOOR) -> Tensor:
        """1 up to the threshold, t0 / t beyond. It needs no floor."""
        t0 = self._distance()
        return torch.where(dist2 <= t0 * t0, 1.0, t0 / floored(dist2, None).sqrt())


@dataclass(frozen=True)
class Truncated(_Thresholded):
    """rho(t) = min(t, t0): beyond the threshold t0 a row costs the same wherever it lies (MESSI, appendix E.1).

    Not convex: rows that a bad start leaves beyond the threshold are never looked at again, so a fit has two
    starts: that of ``Power(1)`` (``stages``), and that of the rows scaled to length 1.

    Raises:
        KflatsError: a threshold that is not positive, or an unknown unit.

    >>> Truncated(2.0).rho(torch.tensor([1.0, 9.0])).tolist(), Truncated(2.0).weight(torch.tensor([1.0, 9.0])).tolist()
    ([1.0, 2.0], [0.5, 0.0])
    """

    @property
    def degree(self) -> float:
        """1: a distance."""
        return 1.0

    def stages(self) -> tuple[Loss, ...]:
        """``Power(1)`` comes first."""
        return (Power(1.0), self)

    def check_reach(self, weights: Tensor, norms2: Tensor) -> None:
        """As for other losses."""
        if not bool((weights > 0).any()) and bool((norms2 > 0).any()):
            raise KflatsError(
                f"every row is farther than {self.threshold:.3g} from every flat",
                hint="a larger threshold, or one in medians of distances",
            )

    def rho(self, dist2: Tensor) -> Tensor:
        """rho of squared distances, elementwise."""
        return dist2.clamp_min(0.0).sqrt().clamp_max(self._distance())

    def weight(self, dist2: Tensor, norms2: Tensor | None = None, floor: float = FLOOR) -> Tensor:
        """1 / (2 t) below the threshold, floored as in ``Power(1)``; 0 from it on."""
        inside = dist2 < self._distance() ** 2
        return torch.where(inside, Power(1.0).weight(dist2, norms2, floor), 0.0)


Loss: TypeAlias = Squared | Power | Huber | Truncated


def check_loss(value: object) -> None:
    """Refuse a value that is no loss.

    Raises:
        KflatsError: otherwise.
    """
    if not isinstance(value, Loss):
        raise KflatsError(f"no loss of distances is {value!r}", hint="a squared, power, huber or truncated loss")


def from_name(name: str) -> Loss:
    """A loss from its ``name``: "squared", "power 1", "huber 0.5", "truncated 3 median".

    Raises:
        KflatsError: no text, an unknown loss or unit, or a number that is missing or outside its range.

    >>> from_name("truncated 3 median")
    Truncated(threshold=3.0, unit='median')
    """
    if not isinstance(name, str):
        raise _unknown(name)
    kind, *rest = name.strip().lower().split() or [""]
    try:
        numbers = [float(part) for part in rest[:1]]
    except ValueError:
        raise _unknown(name) from None
    if kind == "squared" and not rest:
        return Squared()
    if kind == "power" and len(rest) == 1:
        return Power(numbers[0])
    if kind in ("huber", "truncated") and len(rest) in (1, 2):
        unit: Unit = "absolute" if len(rest) == 1 else rest[1]  # type: ignore[assignment]  # checked by the loss
        return Huber(numbers[0], unit) if kind == "huber" else Truncated(numbers[0], unit)
    raise _unknown(name)


def floored(dist2: Tensor, norms2: Tensor | None, floor: float = FLOOR) -> Tensor:
    """Squared distances, at least the share ``floor`` of the rows' squared norms (if given) and never 0."""
    tiny = torch.finfo(dist2.dtype).tiny
    if norms2 is None:
        return dist2.clamp_min(tiny)
    return torch.maximum(dist2, (floor * norms2).to(dist2.dtype)).clamp_min(tiny)


def _short(number: float) -> str:
    return f"{number:g}" if float(f"{number:g}") == number else repr(number)


def _unknown(name: object) -> KflatsError:
    return KflatsError(
        f"no loss is called {name!r}", hint='"squared", "power 1", "huber 0.5", "truncated 3", "truncated 3 median"'
    )
