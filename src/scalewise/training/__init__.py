"""Training: a program under several methods side by side."""

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
