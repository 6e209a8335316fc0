"""Every registered variant conforms."""

import pytest

from variants.conformance import pytest_cases


@pytest.mark.parametrize("conforms", pytest_cases())
def test_a_registered_variant(conforms):
    conforms()
