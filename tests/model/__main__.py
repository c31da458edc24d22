"""``python -m tests.model``: search every machine, and print what was found.

``--variants``: those without a precaution, with the steps to the broken promise. ``--largest``: kicks everywhere.
"""

import sys
from time import process_time

from tests.model.cases import LARGE, LARGEST, SMALL, VARIANTS
from tests.model.protocol import Protocol
from tests.model.search import search

sizes = {} if "--variants" in sys.argv else LARGEST if "--largest" in sys.argv else SMALL | LARGE
for name, size in sizes.items():
    began = process_time()
    found = search(Protocol(size))
    print(f"{name}: {found} ({process_time() - began:.0f} s of CPU)", flush=True)
for name, variant in VARIANTS.items():
    print(f"\n{name}: {variant.says}\n{search(Protocol(variant.size, name), variant.breaks)}")
