"""`python -m groupwise` is the command `groupwise`."""

import sys

from groupwise.cli import main

sys.exit(main())
