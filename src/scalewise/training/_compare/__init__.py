"""Trains one program under several methods side by side, and writes a report."""

from ..._user_file import InputError as InputError
from ._compare import compare as compare
from ._files import Folder as Folder
from ._methods import DEMO as DEMO
from ._methods import METHODS as METHODS
from ._methods import Method as Method
from ._methods import method as method
from ._program import Program as Program
from ._program import call_user as call_user
from ._program import corpus as corpus
from ._program import endless_batches as endless_batches
from ._program import load_program as load_program
from ._program import parameter_count as parameter_count
from ._program import params_of as params_of
from ._results import Comparison as Comparison
from ._results import Divergence as Divergence
from ._results import Record as Record
from ._results import finite_or_none as finite_or_none
