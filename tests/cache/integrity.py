"""What must hold of a table of blocks between steps."""

from collections import Counter

from coattn.cache.block_table import BlockTable


def check_blocks(table: BlockTable) -> None:
    """Every handed-out id is in sequences or held as often as is counted, or free once."""
    users = Counter(i for owned in table.owned.values() for i in owned)
    ids = sorted([*(users.keys() | table._held.keys()), *table._free])
    assert ids == list(range(table._next)), "not every id is used or free exactly once"
    assert dict(users) == table._users, "not every use is counted exactly once"
    assert table.idle == len(table._held.keys() - users.keys())
