"""Estimators of the gradient for `MARS`: what c_t is made of. To add one, write it as those here and name it below."""

from optim.estimators.interface import Estimator, SecondGradient
from optim.estimators.mean import MeanGradient
from optim.estimators.recursive import Exact, Recursive
from optim.estimators.svrg import SVRG

ESTIMATORS = ("recursive", "reference", "svrg", "none")


def new_estimators(exact: bool) -> dict[str, Estimator]:
    """One of each, for the groups of one optimizer.

    Args:
        exact: whether "recursive" is the exact form.
    """
    return {
        "recursive": Exact() if exact else Recursive(),
        "reference": MeanGradient(),
        "svrg": SVRG(),
        "none": Estimator(),
    }


__all__ = ["ESTIMATORS", "SVRG", "Estimator", "SecondGradient", "new_estimators"]
