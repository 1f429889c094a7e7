"""Trains one program by one method, with metrics and checkpoints to resume from."""

from ._folder import CheckpointError as CheckpointError
from ._metrics import Log as Log
from ._run import TrainingError as TrainingError
from ._sharding import Sharding as Sharding
from ._train import Trained as Trained
from ._train import step_for as step_for
from ._train import train as train
