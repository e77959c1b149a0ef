"""The target's ids of a draft's tokens, for drafts with a reduced vocabulary."""

import numpy as np
import numpy.typing as npt

from tandemrt.engines.bundle.bundle import Bundle
from tandemrt.engines.bundle.manifest import TARGET_IDS
from tandemrt.engines.validation.errors import BadBundle, clipped

TargetIds = npt.NDArray[np.int32]


def read_target_ids(bundle: Bundle) -> TargetIds | None:
    """Return the target's id of each draft logit, int32 [width], ascending; None if the vocabularies are equal.

    Raises BadBundle for a file that holds anything else.
    """
    if (count := bundle.draft.draft_vocab) is None:
        return None
    path, rule = bundle.folder / TARGET_IDS, f"int32 [{count}], ids below {bundle.vocab}, ascending"
    try:
        ids: TargetIds = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise BadBundle(f"{path} must be an array of numpy; got {clipped(error)}; build the bundle again") from error
    if ids.dtype != np.int32 or ids.shape != (count,):
        raise BadBundle(f"{path} must be {rule}; got {ids.dtype} {list(ids.shape)}; build the bundle again")
    if ids[0] < 0 or ids[-1] >= bundle.vocab or (np.diff(ids) <= 0).any():
        actual = f"{ids.min()} to {ids.max()}, not all above the one before"
        raise BadBundle(f"{path} must be {rule}; got {actual}; build the bundle again")
    return ids
