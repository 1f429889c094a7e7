"""Training: loss scaling, narrow states, the whole step; a program under several methods."""

from ._compare import METHODS as METHODS
from ._compare import Comparison as Comparison
from ._compare import Death as Death
from ._compare import InputError as InputError
from ._compare import Method as Method
from ._compare import Program as Program
from ._compare import Record as Record
from ._compare import compare as compare
from ._compare import corpus as corpus
from ._compare import load_program as load_program
from ._compare import method as method
from ._finite import all_finite as all_finite
from ._loss_scale import DynamicLossScale as DynamicLossScale
from ._loss_scale import LossScaledState as LossScaledState
from ._loss_scale import LossScaleState as LossScaleState
from ._loss_scale import StaticLossScale as StaticLossScale
from ._loss_scale import loss_scale_of as loss_scale_of
from ._loss_scale import loss_scaled as loss_scaled
from ._loss_scale import scale_loss as scale_loss
from ._loss_scale import unscale as unscale
