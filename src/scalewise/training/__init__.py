"""Mixed-precision training: loss scaling, narrow weights and moments, whole steps."""

from .._extras import require as _require

_require("optax", "train", "scalewise.training")

from ._gradients import all_finite as all_finite
from ._gradients import mean_over as mean_over
from ._loss_scale import DynamicLossScale as DynamicLossScale
from ._loss_scale import StaticLossScale as StaticLossScale
from ._loss_scale import loss_scale_of as loss_scale_of
from ._loss_scale import loss_scaled as loss_scaled
from ._loss_scale import scale_loss as scale_loss
from ._loss_scale import unscale as unscale
from ._moments import STATES as STATES
from ._moments import ExpandedStorage as ExpandedStorage
from ._moments import TableStorage as TableStorage
from ._moments import store_state as store_state
from ._moments import widen as widen
from ._step import step as step
from ._weights import apply_updates as apply_updates
from ._weights import compensated as compensated
from ._weights import master_weights as master_weights
from ._weights import stochastic_rounding as stochastic_rounding

__all__ = [
    "STATES", "DynamicLossScale", "ExpandedStorage", "StaticLossScale", "TableStorage",
    "all_finite", "apply_updates", "compensated", "loss_scale_of", "loss_scaled", "master_weights",
    "mean_over", "scale_loss", "step", "stochastic_rounding", "store_state", "unscale", "widen",
]  # fmt: skip

# the classes of results, for annotations
from ._loss_scale import LossScaledState as LossScaledState
from ._loss_scale import LossScaleState as LossScaleState
from ._model import Metrics as Metrics
from ._model import TrainState as TrainState
from ._moments import BlockwiseStored as BlockwiseStored
from ._step import Step as Step
from ._weights import CompensatedState as CompensatedState
from ._weights import MasterState as MasterState
from ._weights import StochasticState as StochasticState

_DOCUMENTED = dir()  # the reference has these names

# for other packages of scalewise, not for users
from ._moments import NARROW_ADAM as NARROW_ADAM
