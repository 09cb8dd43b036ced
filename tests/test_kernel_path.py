"""The default kernels of an H200 from prompt to drafts, in Triton's interpreter."""

import jax.numpy as jnp
import numpy as np
import pytest

from qwen4jax.pallas.registry import REFERENCE
from tests.kernel_choices import fallen_back, recorded
from tests.kernel_path import (
    WITH_KERNEL,
    Decoded,
    Followed,
    assert_agree,
    assert_exact,
    decode,
    follow,
    random_prompts,
)
from tests.kernel_widths import FORMS, params
from tests.pallas.triton_interpreter import interpreted

# the draft head's experts are in the other form
MODEL = FORMS[0]
# rounds that accept all, some and none of the drafts
PROMPTS = random_prompts((5, 4), seed=12)


def test_the_default_kernels_agree_with_the_references():
    """One test, for of several each process that gets one would interpret the same programs."""
    with interpreted(), recorded() as choices:
        decoded = decode(params(MODEL), PROMPTS, rounds=2, chunk=5)
    assert not fallen_back(choices, narrow=True)
    assert {c.operation for c in choices if c.chosen != REFERENCE} >= WITH_KERNEL
    assert {n for accepted in decoded.accepted for n in accepted} >= {0, 2, 3}
    followed = follow(params(MODEL), decoded)
    assert_agree(decoded, followed)
    assert_exact(params(MODEL), decoded)
    for off in replaced(decoded, followed):
        with pytest.raises(AssertionError, match="is off by"):
            assert_agree(off, followed)


def replaced(decoded: Decoded, followed: Followed) -> list[Decoded]:
    """What kernels gave with one part off."""
    state = decoded.state
    first, *others = state.layers
    unlikely = int(np.argmin(followed.logits[0, len(PROMPTS[0]) - 1]))
    worst = jnp.asarray(np.argmin(followed.drafts, axis=-1), jnp.int32)
    recurrent = first.replace(recurrent=first.recurrent * 1.1)
    changed = (
        state.replace(drafts=worst),
        state.replace(layers=(recurrent, *others)),
        state.replace(mtp=state.mtp.replace(value=state.mtp.value * 1.1)),
    )
    return [
        decoded._replace(logits=decoded.logits[::-1]),
        decoded._replace(ids=[[unlikely, *decoded.ids[0][1:]], decoded.ids[1]]),
        *(decoded._replace(state=one) for one in changed),
    ]
