"""The prefix cache of all replicas, and the identity under which its snapshots lie on disk."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from blake3 import blake3

from rekindle.build.model import Model
from rekindle.build.types import DTYPES
from rekindle.config import Config, show_bytes, snapshot_folder
from rekindle.errors import BadConfig
from rekindle.kernels.native.files import native_files
from rekindle.placement import Plan
from rekindle.pool.choice import LEAD
from rekindle.prefix import HeldStates, PrefixCache, Tier, check_budgets, local_tiers
from rekindle.snapshots.about import About, describe, strangers
from rekindle.snapshots.disk import DiskStore
from rekindle.snapshots.files import make_folder
from rekindle.snapshots.folder import held_bytes
from rekindle.snapshots.slabs import Slabs
from rekindle.spec import PAGE, SnapshotBytes

log = logging.getLogger("rekindle.build")

DISK_PART = 4  # snapshots may have this part of the disk space that is free, or theirs already …
DISK_MOST = 64 << 30  # … and no more than so many bytes, unless --cache-disk says so


class SharedPrefixes(PrefixCache):
    """One cache for all replicas: each restores what another has computed. The last replica to stop closes it."""

    def __init__(self, tiers: Sequence[Tier], sizes: SnapshotBytes, held: HeldStates | None, sharers: int) -> None:
        super().__init__(tiers, sizes, held)
        self._sharers = sharers

    def close(self) -> None:
        self._sharers -= 1
        if self._sharers == 0:
            super().close()


def make_cache_folder(folder: Path) -> None:
    """A folder that is there but cannot be written is accepted: it still gives hits."""
    try:
        make_folder(folder)
    except OSError as error:
        raise BadConfig(f"--cache-dir {folder} is no folder and cannot be made: {error.strerror}") from error


def own_cache_folder() -> Path | None:
    """The user's, made if need be. Where it cannot be made the log says so, and a server keeps snapshots in RAM only:
    nobody asked for the folder."""
    folder, why = snapshot_folder(), "this user has no home"
    try:
        if folder is not None:
            make_folder(folder)
            return folder
    except OSError as error:
        why = str(error)
    log.warning("snapshots will not survive a restart: %s; --cache-dir names a folder for them", why)
    return None


def disk_budget(free: int, held: int) -> int:
    """Bytes for snapshots where none are asked for; they hold some already, so that a start does not shrink them."""
    return min((free + held) // DISK_PART, DISK_MOST)


def make_prefix_cache(
    config: Config, model: Model, plans: Sequence[Plan], slabs: list[Slabs], busy: Callable[[], bool]
) -> PrefixCache:
    """plans: of all replicas. Snapshots from disk are loaded into the slabs of the first GPU, if there is one: pinned
    memory of one GPU serves every other of this process too. busy: whether a replica of this model has requests."""
    plan, ram = plans[0], sum(each.snapshot_ram for each in plans)
    asked, sizes = config.cache_ram, plan.snapshot_bytes
    if asked is not None and ram < asked // config.replicas * config.replicas:
        log.warning("snapshots get %s of RAM, --cache-ram is %s", show_bytes(ram), show_bytes(asked))
    tiers = local_tiers(ram, _disk_store(config, model, plan, slabs), slabs=slabs, busy=busy)
    with ExitStack() as undo:
        for tier in tiers:
            undo.callback(tier.close)
        budgets = {tier.name: tier.budget for tier in tiers if tier.writable}
        for warning in [*check_budgets(sizes.state, budgets), *_too_long_to_keep(sizes, plan.wishes.context, budgets)]:
            log.warning("%s", warning)
        log.info("snapshots may take %s; one takes %s beside its pages", _in_words(budgets), show_bytes(sizes.state))
        # Who gives snapshots no room anywhere wants nothing kept, on the device neither.
        held = HeldStates(sizes, sum(each.kept_ram for each in plans)) if any(budgets.values()) else None
        prefixes = SharedPrefixes(tiers, sizes, held, config.replicas)
        undo.pop_all()
    return prefixes


def _too_long_to_keep(sizes: SnapshotBytes, context: int, budgets: Mapping[str, int]) -> Iterator[str]:
    """A warning where prompts that the server takes are longer than what any tier can hold."""
    longest = sizes.longest(max(budgets.values()))
    if any(budgets.values()) and longest < context:
        yield (
            f"prompts of more than {longest:,} tokens are computed each time: at the context limit of {context:,} a "
            f"snapshot takes {show_bytes(sizes.at(context))}, and snapshots may take {_in_words(budgets)}"
        )


def _in_words(budgets: Mapping[str, int]) -> str:
    """Say "8.0 GiB of RAM and 64.0 GiB of disk"."""
    names = {"ram": "RAM"}
    return " and ".join(f"{show_bytes(budget)} of {names.get(tier, tier)}" for tier, budget in budgets.items())


def _disk_store(config: Config, model: Model, plan: Plan, slabs: list[Slabs]) -> DiskStore | None:
    if config.cache_dir is None or config.cache_disk == 0:
        return None
    traits = traits_of(model, plan)
    identity = state_identity(traits)
    disk = DiskStore(
        config.cache_dir,
        identity,
        config.cache_disk or _free_disk(config.cache_dir, identity),
        slabs=slabs[0] if slabs else None,
        files=native_files(),
        vocabulary=plan.spec.vocab,
        largest=_largest_object(plan),
    )
    _log_foreign_snapshots(config.cache_dir, disk, about(traits))
    return disk


def _free_disk(folder: Path, identity: str) -> int:
    free, held = shutil.disk_usage(folder).free, held_bytes(folder, identity)
    budget = disk_budget(free, held)
    log.info("snapshots may take %s in %s, where %s are free", show_bytes(budget), folder, show_bytes(free))
    return budget


def _log_foreign_snapshots(folder: Path, disk: DiskStore, about: About) -> None:
    """A folder filled under another setting looks empty: the log says what its snapshots were made for."""
    describe(disk, about)
    if not len(disk):
        for found in strangers(folder, disk, about):
            log.info("%d snapshots in %s are of another model or setting: %s", found.count, folder, found.differs)


class Trait(NamedTuple):
    """One of the things that decide whether a snapshot can be restored here."""

    name: str
    words: str  # for people
    key: str  # for the identity; "" where it does not depend on this trait


def traits_of(model: Model, plan: Plan) -> list[Trait]:
    """Weights and everything else that decides what bits a state holds and how they are stored."""
    wishes, weights = plan.wishes, model.file.fingerprint()
    dtype = next(name for name, dtype in DTYPES.items() if dtype.itemsize == wishes.compute_bytes)
    traits = [
        Trait("model", model.name, ""),  # the same weights under another name are the same
        Trait("weights", weights[:12], weights),
        Trait("KV", wishes.kv_type, wishes.kv_type),
        Trait("activations", dtype, str(wishes.compute_bytes)),
    ]
    if wishes.kv_mode != "sparse":
        return [*traits, Trait("KV mode", wishes.kv_mode, "")]
    # What was left out depends on the pool, the policy and the rows that choose.
    return [
        *traits,
        Trait("KV mode", "sparse", "sparse"),
        Trait("policy", wishes.kv_policy, wishes.kv_policy),
        Trait("lead", str(LEAD), str(LEAD)),
        Trait("pool", f"{plan.pool_pages * PAGE:,} tokens", f"{plan.pool_pages} pages by layer"),
    ]


def about(traits: list[Trait]) -> About:
    return {trait.name: trait.words for trait in traits}


def state_identity(traits: list[Trait]) -> str:
    return blake3(" ".join(trait.key for trait in traits if trait.key).encode()).hexdigest()


def _largest_object(plan: Plan) -> int:
    """Bytes, generously: a bound that keeps a manifest with false sizes from taking all memory."""
    return 2 * (plan.snapshot_bytes.state + plan.snapshot_bytes.page) + (64 << 20)
