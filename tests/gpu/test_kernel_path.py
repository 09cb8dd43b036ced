"""The default kernels of an H200 from prompt to drafts, against the references on the same device.

`tests/test_kernel_path.py` runs the same functions on a CPU, in Triton's interpreter.
"""

import pytest

from qwen4jax.pallas import registry
from tests.kernel_choices import fallen_back, recorded
from tests.kernel_path import (
    WITH_KERNEL,
    assert_agree,
    assert_exact,
    decode,
    follow,
    random_prompts,
)
from tests.kernel_widths import FORMS, Forms, params

# for few rows; and for many, which other kernels take than decoding's
LENGTHS = {"few": (5, 4), "many": (150, 70)}

# of what scores have chosen that may be nearly equal
MOST = 0.8


@pytest.mark.gpu("H200")
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("forms", FORMS, ids=lambda forms: f"{forms.main}_draft_{forms.draft}")
def test_kernels_agree_with_the_references(forms: Forms, lengths: str):
    prompts = random_prompts(LENGTHS[lengths])
    with recorded() as choices:
        decoded = decode(params(forms), prompts, rounds=6, chunk=max(LENGTHS[lengths]))
    assert not fallen_back(choices, narrow=True)
    assert {c.operation for c in choices if c.chosen != registry.REFERENCE} >= WITH_KERNEL
    assert_agree(decoded, follow(params(forms), decoded), share=MOST)
    assert_exact(params(forms), decoded, share=MOST)
