"""Least squares whose solution has no negative entry (the active-set method of Lawson and Hanson).

Small and dense: the rows are folded into a square triangle first, so that the cost of a solve does not
depend on how many samples there are.
"""

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def nonnegative_least_squares(matrix: Array, target: Array) -> Array:
    """x >= 0 that minimises |matrix @ x - target|. Columns may be zero or linearly dependent."""
    num_columns = matrix.shape[1]
    norms = np.linalg.norm(matrix, axis=0)
    norms[norms == 0.0] = 1.0
    orthogonal, triangle = np.linalg.qr(matrix / norms)
    scaled: Array = _active_set(triangle, orthogonal.T @ target, num_columns) / norms
    return scaled


def _active_set(matrix: Array, target: Array, num_columns: int) -> Array:
    solution = np.zeros(num_columns)
    passive = np.zeros(num_columns, dtype=bool)
    tolerance = 1e-12 * max(1.0, float(np.abs(matrix.T @ target).max(initial=0.0)))
    # Each round admits one column; dependent columns could make it cycle, hence the bound.
    for _ in range(10 * num_columns):
        gradient = matrix.T @ (target - matrix @ solution)
        gradient[passive] = -np.inf
        best = int(np.argmax(gradient))
        if gradient[best] <= tolerance:
            break
        passive[best] = True
        solution = _feasible(matrix, target, solution, passive)
    return solution


def _feasible(matrix: Array, target: Array, solution: Array, passive: NDArray[np.bool_]) -> Array:
    """Solve over the passive columns, dropping those that would turn negative; changes `passive`."""
    while passive.any():
        trial = np.zeros_like(solution)
        trial[passive] = np.linalg.lstsq(matrix[:, passive], target, rcond=None)[0]
        blocking = passive & (trial <= 0.0)
        if not blocking.any():
            return trial
        gap = solution[blocking] - trial[blocking]
        steps = np.divide(solution[blocking], gap, out=np.zeros_like(gap), where=gap > 0.0)
        solution = solution + float(steps.min()) * (trial - solution)
        passive &= solution > 1e-15
        solution[~passive] = 0.0
    return np.zeros_like(solution)
