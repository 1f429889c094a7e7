"""Rounding: casts of floats to formats, each bit-exact with a single rounding."""

from ._codes import decode as decode
from ._encoded import EncodedArray as EncodedArray
from ._encoded import encode as encode
from ._encoded import pack as pack
from ._encoded import unpack as unpack
from ._round import SATURATION_RULES as SATURATION_RULES
from ._round import cast as cast
from ._round import round_to as round_to
from ._round import saturation as saturation

__all__ = ["SATURATION_RULES", "EncodedArray", "decode", "encode", "pack", "unpack"]

# for other packages of scalewise, not for users
from ._bits import round_bits as round_bits
from ._by_params import FORMAT_PARAMS as FORMAT_PARAMS
from ._by_params import FP32_PARAMS as FP32_PARAMS
from ._by_params import FP64_PARAMS as FP64_PARAMS
from ._by_params import RANGE as RANGE
from ._by_params import SMALLEST_EXPONENT as SMALLEST_EXPONENT
from ._by_params import format_params as format_params
from ._by_params import is_wide as is_wide
from ._by_params import is_wider as is_wider
from ._by_params import power_of_two as power_of_two
from ._by_params import round_by as round_by
from ._by_params import scale_params as scale_params
from ._codes import CONVERTED as CONVERTED
from ._codes import codes_of as codes_of
from ._codes import converted as converted
from ._codes import from_float64 as from_float64
from ._codes import has_float64 as has_float64
from ._codes import is_plain as is_plain
from ._codes import nearest_codes as nearest_codes
from ._codes import stored as stored
from ._codes import to_float64 as to_float64
from ._codes import widened as widened
from ._encoded import PACKED_AXIS as PACKED_AXIS
from ._encoded import StoredArray as StoredArray
from ._encoded import exportable as exportable
from ._encoded import is_packed as is_packed
from ._round import float_array as float_array
