"""One tree of errors; a sample's error survives the way from a worker."""

import pickle

from zephon_mm import errors
from zephon_mm.errors import ConfigError, SampleError, ZephonError


def test_every_error_is_a_zephon_error_and_a_config_error_is_a_value_error() -> None:
    found = [e for e in vars(errors).values() if isinstance(e, type) and issubclass(e, Exception)]
    assert len(found) >= 9
    assert all(issubclass(error, ZephonError) for error in found)
    assert issubclass(ConfigError, ValueError)


def test_a_sample_error_keeps_its_reason_when_pickled() -> None:
    error = pickle.loads(pickle.dumps(SampleError("no_image", "found none")))
    assert (error.reason, error.message) == ("no_image", "found none")
    assert str(error) == "[no_image] found none"
