"""The laboratory's tests run under the rules of the package's."""

from tests.conftest import _seed, device, pytest_collection_modifyitems

__all__ = ["_seed", "device", "pytest_collection_modifyitems"]
