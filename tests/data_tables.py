"""Tables of plain data: `tables.yaml` has each under its name."""

from pathlib import Path

import yaml

TABLES = yaml.safe_load(Path(__file__).with_name("tables.yaml").read_text("utf-8"))
