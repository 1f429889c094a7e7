"""One program trained under one recipe: checkpoints, metrics, and resumption to the same bits."""

from ._checkpoint import CheckpointError as CheckpointError
from ._metrics import Log as Log
from ._recipes import RECIPES as RECIPES
from ._recipes import step_for as step_for
from ._sharding import Sharding as Sharding
from ._train import Trained as Trained
from ._train import TrainingError as TrainingError
from ._train import train as train
