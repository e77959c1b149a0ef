"""The supported model families by architecture, one row each.

The config provides everything else (export/read/spec.py), so the only code of a family reads fields that other
families do not have.
"""

from tandemrt.export.read.families import dense, experts, latent, learned, parallel, recurrent, renamed

FAMILIES = {
    architecture: row
    for module in (dense, renamed, parallel, learned, recurrent, experts, latent)
    for row in module.ROWS
    for architecture in row.architectures
}
BY_NAME = {row.name: row for row in FAMILIES.values()}
