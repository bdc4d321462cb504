"""`python -m elementgrad`."""

import sys

from elementgrad._cli import main

sys.exit(main())
