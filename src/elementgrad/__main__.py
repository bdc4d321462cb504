"""`python -m elementgrad`."""

import sys

from elementgrad.cli import main

sys.exit(main())
