"""Python imports this when it starts beside a claim that is recorded (smoke_tests/recorder.py puts it on the path)."""

import importlib.util
import sys
from pathlib import Path

NAME = "smoke_tests.recorder"
specification = importlib.util.spec_from_file_location(NAME, Path(__file__).resolve().parents[1] / "recorder.py")
assert specification and specification.loader
recorder = importlib.util.module_from_spec(specification)
sys.modules[NAME] = recorder  # the one that a pytest worker imports later
specification.loader.exec_module(recorder)
recorder.begin_child()
