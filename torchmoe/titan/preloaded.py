"""Importing this module makes torchtitan ready (:func:`torchmoe.titan.shims.ensure`) and imports the whole adapter."""

from torchmoe.titan.shims import ensure

ensure()

import torchmoe.titan.data  # noqa: E402
import torchmoe.titan.exact  # noqa: E402
import torchmoe.titan.model  # noqa: E402
import torchmoe.titan.trainer  # noqa: E402, F401
