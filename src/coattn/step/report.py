"""What is known of the steps and the memory of groups of layers."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from coattn.auto.audit.audit import Audit
from coattn.step.layer_group import LayerGroup
from coattn.types import Step, Tier


class Reports:
    """What a runtime knows of its steps and its memory."""

    groups: list[LayerGroup]

    def reports(self, step: Step) -> list[dict[str, Any]]:
        """What the parts of each group say of the last decode step. May wait for the GPU."""
        return [_report(group, step) for group in self.groups]

    def report(self, step: Step) -> dict[str, Any]:
        """What all of them and the audits say as one."""
        whole = self.merged(self.reports(step))
        for audit in self.audits():
            whole["audit"] = audit.report()
        return whole

    def merged(self, said: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """`reports` of the groups as one; of the method's own layers where they say the same.

        Where those lie on several devices, bytes are added up and other numbers are the mean over the layers.
        """
        whole: dict[str, Any] = {}
        for window in (True, False):
            whole |= _together(
                [
                    (len(group.cache.spec.layers), own)
                    for group, own in zip(self.groups, said, strict=True)
                    if (group.cache.spec.shape.sliding_window is not None) is window
                ]
            )
        return whole

    def audits(self) -> list[Audit]:
        return [group.audit for group in self.groups if group.audit is not None]

    def attended(self, step: Step, said: Sequence[dict[str, Any]] | None = None) -> tuple[int, int]:
        """Entries that a decode step attends to on the GPU and in DRAM, over its sequences, averaged over the layers.

        said: the groups' `reports`, if known. Codes that are scored on the GPU count there, by their bytes.
        """
        layers = sum(len(group.cache.spec.layers) for group in self.groups)
        gpu = host = 0.0
        for group, report in zip(self.groups, said or self.reports(step), strict=True):
            most = group.select.most()
            own, other = report["attended_gpu"], report["attended_host"]
            if most is not None and not other:  # sequences of about the same length, or an estimate
                own = min(own, most * step.seqs)
            share = len(group.cache.spec.layers) / layers
            gpu, host = gpu + share * own, host + share * other
        return round(gpu), round(host)

    def token_bytes(self) -> tuple[int, int]:
        """Bytes of one token of all layers, on the GPU and in DRAM."""
        gpu = host = 0
        for group in self.groups:
            memory, tier = group.cache.gpu.memory, group.cache.host
            own = memory.block_bytes // memory.block
            gpu += own
            host += own if tier is None else tier.memory.block_bytes // tier.block
        return gpu, host

    def bytes_for(self, tokens: int) -> dict[Tier, int]:
        """Bytes per tier that a sequence of so many tokens takes of what the sequences share."""
        return _bytes_for(self.groups, tokens)

    def free_bytes(self) -> dict[Tier, int | None]:
        """Bytes per tier that sequences can still be given; None: no limit.

        A sequence takes of all devices in the same proportion: the fullest says how much more of it there can be.
        """
        stages = _stages(self.groups)
        if len(stages) == 1:
            return _free(self.groups)
        free: dict[Tier, int | None] = {}
        for own in stages:
            for tier, count in _free(own).items():
                share = _share(self.groups, own, tier)
                # a count may have been rounded down: a byte more is less than a block
                fits = None if count is None or not share else int((count + 1) / share)
                before = free.get(tier)
                free[tier] = before if fits is None else fits if before is None else min(before, fits)
        return free

    def fullest(self, tier: Tier) -> tuple[str, float]:
        """Of several devices, the one with the least room for more of a sequence, and its share of a sequence's bytes.

        DRAM belongs to none of them.
        """
        stages = _stages(self.groups)
        if len(stages) == 1 or tier == "host":
            return "", 1.0
        rooms = []
        for k, own in enumerate(stages):
            share, count = _share(self.groups, own, tier), _free(own).get(tier)
            if count is not None and share:
                rooms.append((count / share, k, share))
        if not rooms:
            return "", 1.0
        _, k, share = min(rooms)
        return stages[k][0].cache.spec.ledger.device, share


def _bytes_for(groups: Sequence[LayerGroup], tokens: int) -> dict[Tier, int]:
    total: Counter[Tier] = Counter()
    for group in groups:
        total.update(group.cache.gpu.bytes_for(tokens))
    return dict(total)


def _stages(groups: Sequence[LayerGroup]) -> list[list[LayerGroup]]:
    return [[g for g in groups if g.stage == stage] for stage in sorted({g.stage for g in groups})]


def _share(groups: Sequence[LayerGroup], own: Sequence[LayerGroup], tier: Tier) -> float:
    """Of the bytes that a sequence takes, those in one stage."""
    many = 1024 * max(group.cache.block for group in groups)
    whole = _bytes_for(groups, many).get(tier, 0)
    return _bytes_for(own, many).get(tier, 0) / whole if whole else 0.0


def _free(groups: Iterable[LayerGroup]) -> dict[Tier, int | None]:
    free: dict[Tier, int | None] = {}
    for group in groups:
        for tier, count in group.cache.gpu.free_bytes().items():
            before = free.get(tier, 0)
            free[tier] = None if count is None or before is None else before + count
    return free


def _report(group: LayerGroup, step: Step) -> dict[str, Any]:
    """Of one group; entries attended among it."""
    cache = group.cache
    gpu, host = 0.0, 0
    for slot, seen in zip(step.slots, step.visible, strict=True):
        tokens = cache.gpu.stored_tokens(slot, seen)  # the step is over: what it saw is stored
        gpu += cache.gpu.entries(slot, tokens) + cache.gpu.pool_entries(slot)
        if cache.host is not None:
            host += (cache.gpu.first(tokens) - cache.gpu.sinks) * cache.block
    report: dict[str, Any] = {"attended_gpu": gpu, "attended_host": float(host)}
    for part in group.all():
        report |= part.report(step)
    if group.replayed and group.mailbox_bridge is not None:
        report |= group.mailbox_bridge.report()
    if "row_entries" in report and host:
        rows = report["row_entries"]
        report |= {"kept_mean": rows / host, "attended_host": rows}
        report["attended_gpu"] += host * report.get("code_share", 0.0)
    return report


def _together(parts: Sequence[tuple[int, dict[str, Any]]]) -> dict[str, Any]:
    """parts: of each group, its layers and what it says."""
    if len(parts) <= 1:
        return parts[0][1] if parts else {}
    whole: dict[str, Any] = {}
    for name in {name: None for _, said in parts for name in said}:
        told = [(layers, said[name]) for layers, said in parts if name in said]
        add: Callable[..., Any] = sum
        if "bytes" in name:
            whole[name] = add(value for _, value in told)
        else:
            whole[name] = add(n * value for n, value in told) / add(n for n, _ in told)
    return whole
