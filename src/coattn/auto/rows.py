"""The parts of `auto`, and its row."""

from coattn.auto.executor import FetchScored
from coattn.auto.index import Sketch
from coattn.auto.maintenance import SketchMaintenance
from coattn.auto.select import WeightFloor
from coattn.parts.method import Method

PARTS = (Sketch, WeightFloor, FetchScored, SketchMaintenance)

METHODS = (
    Method(
        "auto",
        cache="tiered",
        index="sketch",
        select="weight_floor",
        executor="fetch",
        maintenance="fit",
        summary="Lossy. KV in DRAM. A few bits of every key stay on the GPU and pick the tokens that a query needs; "
        "the GPU fetches those, one value stands in for the others. You set the error, not a budget.",
        params={"window_blocks": 4},
        # docs/log/auto.md says what they do
        internal=frozenset(
            {"audit", "block", "code_bytes", "far", "hot", "now", "pool_dtype", "pool_share", "window_blocks"}
        ),
    ),
)

WORK_KINDS = {"near": "in a pool in GPU memory", "scored": "as scored rows in DRAM"}
NEEDS = {
    "sketch": "an index that keeps a sketch of every key",
    "fits": "maintenance that fits the sketch to the keys",
}
