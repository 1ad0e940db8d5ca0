"""Normal rows of a multivariate series: season, and how columns and lags go together."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

DAY, WEEK, HOUR = 86_400.0, 604_800.0, 3_600.0
SEASONS = {"none": 0.0, "day": DAY, "week": WEEK}
SEASON_GAIN = 0.95  # a season must bring the held-out error of a column below this share
FEWEST_PERIODS = 2  # of a season, in the data that it is learned from
LEAST_SCALE = 0.01  # of a column's range
CONSTANT_SCALE = 1e-9  # of a column that was always 0
LARGEST_DEVIATION = 50.0  # standard deviations; more does not count for more
LEAST_VARIANCE = 0.01  # of a direction in which the standardised rows hardly vary
WINDOW_SIZE = 100  # numbers in a window of all lags
ROWS_PER_LAG = 10
HELD_OUT = 0.2  # share of the rows, the newest, that chooses seasons and components
LARGEST_LESSON = 5.0  # standard deviations from the mean that `update` learns from
TYPICAL_OUTLIER = 25.0  # squared deviation per number; one outlier must not choose the model
LEAST_GAIN = 1e-3  # of the loss per number that one more component must win
LEAST_MEMORY = 200  # rows


class SeriesScores(NamedTuple):
    """How unusual rows of a series are.

    Attributes:
        bits: (n) Half the squared Mahalanobis distance of each window, in bits.
        expected: (n, d) Each value as the other columns, the rows before and the season imply it.
        deviations: (n, d) Difference from `expected`, in standard deviations of such differences.
    """

    bits: Floats
    expected: Floats
    deviations: Floats


class SeriesModel:
    """Scores rows of d numbers, each together with the rows before it.

    1. From each column its median is taken, or that of the hour of the day or of the week, where
       that predicts held-out rows better. The rest is divided by its standard deviation.
    2. Windows of `lags` rows are modelled by probabilistic PCA (Tipping & Bishop, 1999): a Gaussian
       with covariance V (Λ − σ²) Vᵀ + σ² I, where V and Λ are the first k principal components and
       σ² is the mean variance of the others. k has the best likelihood on held-out rows. With k = 0
       the distance is the norm of the standardised rows, with all components Mahalanobis distance;
       what PCA calls T² and squared prediction error are its two terms.
    3. `update` moves median, seasons, mean and covariance; the memory is as long as `fit`'s data.

    NaN in a value means that it is missing: it is taken as usual.

    Args:
        lags: Rows in a window; None: as many as make 100 numbers, if there are enough rows.
        noise: (d) or one number: standard deviation that a column has by itself, such as that of a
            count, even if the rows to learn from do not show it. It is added to the covariance,
            independent of all else, so that a column that hardly varied is not a precise one.
    """

    def __init__(self, lags: int | None = None, noise: npt.ArrayLike = 0.0) -> None:
        if lags is not None and lags < 1:
            raise ValueError(f"lags={lags} must be at least 1")
        self.requested_lags = lags
        self.noise = np.atleast_1d(np.asarray(noise, dtype=np.float64))
        self.lags = self.components = self.memory = 0
        self.seasons: list[str] = []

    def fit(self, values: npt.ArrayLike, times: npt.ArrayLike | None = None) -> None:
        """Learn from normal rows (n, d), in order of time; a single column may be (n).

        Args:
            values: Numbers; NaN where one is missing.
            times: (n) Seconds since 1970, for seasons.
        """
        rows, clock = _as_rows(values, times)
        n, d = rows.shape
        if n < 2 or d == 0:
            raise ValueError(f"a series needs 2 rows and 1 column to learn from, not {n} and {d}")
        fits = max(1, min(WINDOW_SIZE // d, n // ROWS_PER_LAG))
        self.lags = fits if self.requested_lags is None else self.requested_lags
        if n <= self.lags:
            raise ValueError(f"lags={self.lags} needs more than {n} rows to learn from")
        self.memory = max(n, LEAST_MEMORY)
        if self.noise.shape not in ((1,), (d,)):
            raise ValueError(f"noise is one number or {d}, one a column, not {self.noise.shape}")

        self._choose_seasons(rows, clock)
        residual = rows - self._baseline(clock)
        missing = np.isnan(residual).all(axis=0)
        spread = np.nanstd(np.where(missing, 0.0, residual), axis=0)
        low, high = np.nan_to_num(_range(rows))
        constant = np.maximum(LEAST_SCALE * np.abs(high), CONSTANT_SCALE)
        self.scale = np.maximum(spread, LEAST_SCALE * (high - low))
        self.scale = np.maximum(np.where(high > low, self.scale, constant), self.noise)

        standardised = self._standardise(rows, clock)
        windows = self._windows(standardised)
        split = len(windows) - max(1, round(len(windows) * HELD_OUT))
        self._set_gaussian(*self._moments(windows[: max(split, 1)]), components=0)
        self.components = self._choose_components(windows[split:])
        self._set_gaussian(*self._moments(windows), components=self.components)
        self.tail = standardised[n - self.lags + 1 :]

    def score(
        self, values: npt.ArrayLike, times: npt.ArrayLike | None = None, *, continues: bool = False
    ) -> SeriesScores:
        """Scores of rows (n, d). Windows of the first rows are shorter, and their bits fewer.

        Args:
            values: Numbers; NaN where one is missing.
            times: (n) Seconds since 1970, if `fit` had them.
            continues: Whether the first row follows the last row of `fit` or `update`.
        """
        rows, clock = _as_rows(values, times)
        d = len(self.scale)
        if rows.shape[1] != d:
            raise ValueError(f"the rows have {rows.shape[1]} columns, but those learned had {d}")
        if not len(rows):
            return SeriesScores(np.empty(0), np.empty((0, d)), np.empty((0, d)))
        standardised = self._standardise(rows, clock)
        history = self.tail if continues else np.empty((0, d))
        padded = np.concatenate([history, standardised])
        shorter = range(len(history) + 1, min(self.lags, len(padded) + 1))
        scored = [self._score_windows(padded[:count].reshape(1, -1)) for count in shorter]
        if len(padded) >= self.lags:
            scored.append(self._score_windows(self._windows(padded)))
        bits, expected, deviations = (np.concatenate(part) for part in zip(*scored, strict=True))
        return SeriesScores(bits, expected * self.scale + self._baseline(clock), deviations)

    def _score_windows(self, windows: Floats) -> tuple[Floats, Floats, Floats]:
        """Bits, expected standardised values of the newest rows, and deviations from them.

        Args:
            windows: (n, r · d), of r rows; if r is below `lags`, those before are unknown.
        """
        d, size = len(self.scale), windows.shape[1]
        precision = self.precision
        if size < len(self.mean):
            precision = np.linalg.inv(np.linalg.inv(self.precision)[-size:, -size:])
        centred = windows - self.mean[-size:]
        weighted = centred @ precision
        distance = np.maximum((weighted * centred).sum(axis=1), 0.0)
        own = np.diag(precision)[-d:]
        expected = windows[:, -d:] - weighted[:, -d:] / own
        return distance / (2 * math.log(2)), expected, weighted[:, -d:] / np.sqrt(own)

    def update(self, values: npt.ArrayLike, times: npt.ArrayLike | None = None) -> None:
        """Learn from further normal rows (n, d), which follow the last ones."""
        rows, clock = _as_rows(values, times)
        if not len(rows):
            return
        padded = np.concatenate([self.tail, self._standardise(rows, clock)])
        reach = LARGEST_LESSON * np.sqrt(np.maximum(np.diag(self.covariance), LEAST_VARIANCE))
        windows = np.clip(self._windows(padded), self.mean - reach, self.mean + reach)
        share = min(len(rows) / self.memory, 0.5)
        mean, covariance = self._moments(windows)
        shift = mean - self.mean
        mixed = (1 - share) * self.covariance + share * covariance
        mixed += share * (1 - share) * np.outer(shift, shift)
        self._set_gaussian(self.mean + share * shift, mixed, components=self.components)
        self.tail = padded[len(padded) - self.lags + 1 :]
        self._move_seasons(rows, clock)

    # ------------------------------------------------------------------------------------ season
    def _choose_seasons(self, rows: Floats, clock: Floats | None) -> None:
        """Choose a season for each column, and learn the medians of all that are used."""
        n, d = rows.shape
        self.median = _medians(rows)
        self.seasons = ["none"] * d
        self.tables: dict[str, Floats] = {}
        if clock is None:
            return
        split = n - max(1, round(n * HELD_OUT))
        errors = np.abs(rows[split:] - _medians(rows[:split]))
        best = SEASON_GAIN * np.nan_to_num(_means(errors))
        for name, period in SEASONS.items():
            if not period or clock[split - 1] - clock[0] < FEWEST_PERIODS * period:
                continue
            table = _season_table(rows[:split], clock[:split], period)
            errors = np.abs(rows[split:] - table[_season_bin(clock[split:], period)])
            found = np.nan_to_num(_means(errors))
            for j in np.flatnonzero(found < best):
                self.seasons[j], best[j] = name, found[j]
        for name in set(self.seasons) - {"none"}:
            self.tables[name] = _season_table(rows, clock, SEASONS[name])

    def _baseline(self, clock: Floats | None) -> Floats:
        """Median of each column, (d), or (n, d) at each time if a column has a season."""
        if not self.tables:
            return self.median
        if clock is None:
            raise ValueError("times are missing: this series was found to have a season")
        base = np.repeat(self.median[None], len(clock), axis=0)
        for j, name in enumerate(self.seasons):
            if name != "none":
                base[:, j] = self.tables[name][_season_bin(clock, SEASONS[name]), j]
        return base

    def _move_seasons(self, rows: Floats, clock: Floats | None) -> None:
        """Move the medians towards new rows, at most by a standard deviation for each row."""
        share = 1 / self.memory
        for i in range(len(rows)):
            step = np.clip(np.nan_to_num(rows[i] - self.median), -self.scale, self.scale)
            self.median = self.median + share * step
            for name, table in self.tables.items():
                assert clock is not None
                bins = int(SEASONS[name] / HOUR)
                row = int(_season_bin(clock[i : i + 1], SEASONS[name])[0])
                step = np.clip(np.nan_to_num(rows[i] - table[row]), -self.scale, self.scale)
                table[row] += min(share * bins, 1.0) * step

    # ---------------------------------------------------------------------------------- Gaussian
    def _standardise(self, rows: Floats, clock: Floats | None) -> Floats:
        residual = (rows - self._baseline(clock)) / self.scale
        return np.clip(np.nan_to_num(residual), -LARGEST_DEVIATION, LARGEST_DEVIATION)

    def _windows(self, standardised: Floats) -> Floats:
        """Windows (n − lags + 1, lags · d) of rows (n, d): the oldest row first."""
        views = np.lib.stride_tricks.sliding_window_view(standardised, self.lags, axis=0)
        return np.ascontiguousarray(views.transpose(0, 2, 1)).reshape(len(views), -1)

    def _moments(self, windows: Floats) -> tuple[Floats, Floats]:
        """Mean and covariance, with the noise."""
        mean = windows.mean(axis=0)
        centred = windows - mean
        covariance = centred.T @ centred / len(windows)
        return mean, covariance + np.diag(np.tile(self.noise / self.scale, self.lags) ** 2)

    def _set_gaussian(self, mean: Floats, covariance: Floats, *, components: int) -> None:
        """Set mean and covariance, and the precision with so many components."""
        self.mean, self.covariance = mean, covariance
        variances, vectors = np.linalg.eigh(covariance)
        self._variances, self._vectors = np.maximum(variances[::-1], 0.0), vectors[:, ::-1]
        noise = _noise(self._variances, components)
        largest = np.maximum(self._variances[:components], noise)
        first = self._vectors[:, :components]
        identity = np.eye(len(mean)) / noise
        self.precision = identity + (first * (1 / largest - 1 / noise)) @ first.T

    def _choose_components(self, windows: Floats) -> int:
        """The number of components with the best likelihood of windows (n, lags · d)."""
        size = windows.shape[1]
        centred = windows - self.mean
        projected = (centred @ self._vectors) ** 2
        rest = (centred**2).sum(axis=1)
        best, best_loss = 0, math.inf
        for k in range(size):
            noise = _noise(self._variances, k)
            largest = np.maximum(self._variances[:k], noise)
            explained = (projected[:, :k] / largest).sum(axis=1)
            distance = explained + (rest - projected[:, :k].sum(axis=1)) / noise
            typical = np.minimum(distance, TYPICAL_OUTLIER * size).mean()
            loss = typical + np.log(largest).sum() + (size - k) * math.log(noise)
            if loss < best_loss - LEAST_GAIN * size:
                best, best_loss = k, float(loss)
        return best

    # ------------------------------------------------------------------------------------ stored
    def to_json(self) -> dict[str, Any]:
        """All but the arrays."""
        return {
            "requested_lags": self.requested_lags,
            "lags": self.lags,
            "components": self.components,
            "memory": self.memory,
            "seasons": self.seasons,
        }

    def tensors(self, prefix: str) -> dict[str, npt.NDArray[Any]]:
        """Arrays of what was learned."""
        arrays = {
            f"{prefix}.median": self.median,
            f"{prefix}.scale": self.scale,
            f"{prefix}.noise": self.noise,
            f"{prefix}.mean": self.mean,
            f"{prefix}.covariance": self.covariance,
            f"{prefix}.tail": self.tail,
        }
        arrays |= {f"{prefix}.season.{name}": table for name, table in self.tables.items()}
        return {name: np.ascontiguousarray(array) for name, array in arrays.items()}

    @classmethod
    def from_json(
        cls, content: dict[str, Any], tensors: dict[str, npt.NDArray[Any]], prefix: str
    ) -> SeriesModel:
        """The inverse of `to_json` and `tensors`."""
        model = cls(content["requested_lags"], tensors[f"{prefix}.noise"])
        model.lags, model.components = content["lags"], content["components"]
        model.memory, model.seasons = content["memory"], content["seasons"]
        model.median = tensors[f"{prefix}.median"]
        model.scale = tensors[f"{prefix}.scale"]
        model.tail = tensors[f"{prefix}.tail"]
        used = set(model.seasons) - {"none"}
        model.tables = {name: tensors[f"{prefix}.season.{name}"].copy() for name in used}
        mean, covariance = tensors[f"{prefix}.mean"], tensors[f"{prefix}.covariance"]
        model._set_gaussian(mean, covariance, components=model.components)
        return model


def _as_rows(values: npt.ArrayLike, times: npt.ArrayLike | None) -> tuple[Floats, Floats | None]:
    rows = np.asarray(values, dtype=np.float64)
    rows = rows[:, None] if rows.ndim == 1 else rows
    if rows.ndim != 2:
        raise ValueError(f"a series is (rows, columns), but its shape is {rows.shape}")
    if np.isinf(rows).any():
        raise ValueError(f"{int(np.isinf(rows).sum())} values of the series are infinite")
    if times is None:
        return rows, None
    clock = np.asarray(times, dtype=np.float64)
    if clock.shape != (len(rows),) or not np.isfinite(clock).all():
        raise ValueError(
            f"times must be {len(rows)} finite numbers, one a row, but their shape is {clock.shape}"
        )
    return rows, clock


def _medians(rows: Floats) -> Floats:
    """Median of each column (d) without NaN; 0 where all are."""
    missing = np.isnan(rows).all(axis=0)
    return np.nanmedian(np.where(missing, 0.0, rows), axis=0)


def _means(rows: Floats) -> Floats:
    """Mean of each column (d) without NaN; 0 where all are."""
    missing = np.isnan(rows).all(axis=0)
    return np.nanmean(np.where(missing, 0.0, rows), axis=0)


def _range(rows: Floats) -> tuple[Floats, Floats]:
    missing = np.isnan(rows).all(axis=0)
    known = np.where(missing, 0.0, rows)
    return np.nanmin(known, axis=0), np.nanmax(known, axis=0)


def _season_bin(clock: Floats, period: float) -> npt.NDArray[np.int64]:
    return (clock % period // HOUR).astype(np.int64)


def _season_table(rows: Floats, clock: Floats, period: float) -> Floats:
    """Medians (hours of the period, d); of all rows for an hour without rows."""
    bins = _season_bin(clock, period)
    overall = _medians(rows)
    table = np.repeat(overall[None], int(period / HOUR), axis=0)
    for number in np.unique(bins):
        inside = rows[bins == number]
        known = ~np.isnan(inside).all(axis=0)
        table[number, known] = _medians(inside)[known]
    return table


def _noise(variances: Floats, components: int) -> float:
    """σ²: the mean variance of the components that are left out."""
    return max(float(variances[components:].mean()), LEAST_VARIANCE)
