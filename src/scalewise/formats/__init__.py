"""Formats: what numbers a format holds and by which codes, as plain data. NumPy only, no JAX."""

from ._catalogue import ALIASES as ALIASES
from ._catalogue import BF16 as BF16
from ._catalogue import CATALOGUE as CATALOGUE
from ._catalogue import DLFLOAT16 as DLFLOAT16
from ._catalogue import E2M1FN as E2M1FN
from ._catalogue import E2M3FN as E2M3FN
from ._catalogue import E3M2FN as E3M2FN
from ._catalogue import E3M4 as E3M4
from ._catalogue import E4M3 as E4M3
from ._catalogue import E4M3B11FNUZ as E4M3B11FNUZ
from ._catalogue import E4M3FN as E4M3FN
from ._catalogue import E4M3FNUZ as E4M3FNUZ
from ._catalogue import E5M2 as E5M2
from ._catalogue import E5M2FNUZ as E5M2FNUZ
from ._catalogue import E8M0 as E8M0
from ._catalogue import FP16 as FP16
from ._catalogue import FP32 as FP32
from ._catalogue import FP64 as FP64
from ._catalogue import TF32 as TF32
from ._catalogue import format as format
from ._catalogue import p3109 as p3109
from ._codes import check_saturate as check_saturate
from ._format import Format as Format
from ._neighbours import next_down as next_down
from ._neighbours import next_up as next_up
from ._neighbours import ulp as ulp
