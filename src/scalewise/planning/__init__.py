"""Plans: which format for each product of a program, at a given cost, and what it changes."""

from ._plan import plan as plan
from ._result import Plan as Plan
from ._rollouts import rollouts as rollouts

__all__ = []

# the classes of results, for annotations
from ._result import FrontPoint as FrontPoint
from ._result import PlanLine as PlanLine
from ._rollouts import Pair as Pair
from ._rollouts import Rollouts as Rollouts
