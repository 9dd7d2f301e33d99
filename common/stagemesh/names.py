"""The form of names that processes tell each other, and the version of the contract that they speak."""

from __future__ import annotations

import re

CONTRACT_VERSION = "1"
"""Of `stagemesh.v1` and the rules around it; a head takes nodes of the same version only."""
LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
"""RFC-1123 label, as names of pipelines, stages and nodes are; for `fullmatch`."""
LABEL_WORDS = "1 to 63 of a-z, 0-9 and '-', beginning and ending with a letter or digit"
REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
"""For `fullmatch`."""
REQUEST_ID_WORDS = "1 to 128 characters of A-Z a-z 0-9 . _ : -"
