"""A module of handlers that takes longer to import than a cold start may."""

import time

time.sleep(600)
