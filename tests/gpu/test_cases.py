"""Every implementation of every operation over the case list, on the device (NUM-01 to NUM-09).

A test is an operation and an implementation, a subtest a case: 20 repeats give the same bits, over
buffers full of NaN. A case that an implementation refuses is skipped with its reason.
"""

from concurrent.futures import ThreadPoolExecutor

import pytest

from bench.operations import operations
from qwen4jax.pallas.registry import REFERENCE
from tests.device_cases import cases_of, outcomes

OPERATIONS = operations()
# compilers that run side by side
JOBS = 8


@pytest.mark.parametrize(
    ("operation", "implementation"),
    [
        pytest.param(name, implementation, id=f"{name}-{implementation}")
        for name, operation in OPERATIONS.items()
        for implementation in operation.implementations
        # which judges the others
        if implementation != REFERENCE
    ],
)
def test_cases(operation: str, implementation: str, subtests: pytest.Subtests):
    tested = OPERATIONS[operation]
    with ThreadPoolExecutor(JOBS) as pool:
        for found in outcomes(tested, implementation, cases_of(tested), each=pool.map):
            with subtests.test(found.case):
                if found.refused:
                    pytest.skip(found.refused)
                assert not found.wrong
