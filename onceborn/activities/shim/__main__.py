"""The shim's entry, run by path so that neither site-packages nor the package is initialised."""

from __future__ import annotations

import os
import sys

# Appended, not put first: nothing installed may stand before the standard library.
sys.path.append(os.path.abspath(os.path.join(__file__, *[os.pardir] * 4)))  # noqa: PTH100, PTH118

from onceborn.activities.shim.entry import main

main(sys.argv[1:])
