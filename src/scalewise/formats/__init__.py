"""Formats: the numbers that each format represents and their codes. Uses NumPy only, not JAX."""

from ._catalogue import BF16 as BF16
from ._catalogue import BLOCK_FORMATS as BLOCK_FORMATS
from ._catalogue import CATALOGUE as CATALOGUE
from ._catalogue import E2M1FN as E2M1FN
from ._catalogue import E2M3FN as E2M3FN
from ._catalogue import E3M2FN as E3M2FN
from ._catalogue import E4M3FN as E4M3FN
from ._catalogue import E4M3FNUZ as E4M3FNUZ
from ._catalogue import E5M2 as E5M2
from ._catalogue import E5M2FNUZ as E5M2FNUZ
from ._catalogue import E8M0 as E8M0
from ._catalogue import FP16 as FP16
from ._catalogue import FP32 as FP32
from ._catalogue import FP64 as FP64
from ._catalogue import MXFP4 as MXFP4
from ._catalogue import MXFP6_E2M3 as MXFP6_E2M3
from ._catalogue import MXFP6_E3M2 as MXFP6_E3M2
from ._catalogue import MXFP8_E4M3 as MXFP8_E4M3
from ._catalogue import MXFP8_E5M2 as MXFP8_E5M2
from ._catalogue import NVFP4 as NVFP4
from ._catalogue import TF32 as TF32
from ._catalogue import BlockFormat as BlockFormat
from ._catalogue import block_format as block_format
from ._catalogue import format as format
from ._catalogue import p3109 as p3109
from ._format import Format as Format
from ._neighbours import bits as bits
from ._neighbours import next_up as next_up
from ._neighbours import ulp as ulp
from ._roundings import ROUNDINGS as ROUNDINGS

__all__ = [
    "BF16", "BLOCK_FORMATS", "CATALOGUE", "E2M1FN", "E2M3FN", "E3M2FN", "E4M3FN", "E4M3FNUZ",
    "E5M2", "E5M2FNUZ", "E8M0", "FP16", "FP32", "FP64", "MXFP4", "MXFP6_E2M3", "MXFP6_E3M2",
    "MXFP8_E4M3", "MXFP8_E5M2", "NVFP4", "ROUNDINGS", "TF32", "BlockFormat", "bits", "block_format",
    "next_up", "p3109", "ulp",
]  # fmt: skip

# types for annotations, and formats that no hardware multiplies: by name, ``format("e3m4")``
from ._catalogue import DLFLOAT16 as DLFLOAT16
from ._catalogue import E3M4 as E3M4
from ._catalogue import E4M3 as E4M3
from ._catalogue import E4M3B11FNUZ as E4M3B11FNUZ
from ._catalogue import UE4M4 as UE4M4
from ._catalogue import UE5M3 as UE5M3
from ._catalogue import UE5M11 as UE5M11
from ._catalogue import UE8M8 as UE8M8
from ._catalogue import FormatLike as FormatLike
from ._catalogue import RoundingMode as RoundingMode
from ._catalogue import Saturation as Saturation
from ._neighbours import Bits as Bits
from ._roundings import Rounding as Rounding

_DOCUMENTED = dir()  # the reference has these names

# for other packages of scalewise, not for users
from ._catalogue import ALIASES as ALIASES
from ._catalogue import BlockFormatLike as BlockFormatLike
from ._catalogue import BlockFormatName as BlockFormatName
from ._catalogue import FloatDType as FloatDType
from ._catalogue import FormatName as FormatName
from ._codes import SATURATE as SATURATE
from ._codes import check_codes as check_codes
from ._roundings import Rest as Rest
from ._roundings import rounding_mode as rounding_mode
