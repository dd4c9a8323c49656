"""A store of KV blocks in files, loaded by vLLM's offloading connector (`kv_transfer.kv_store_config`). vLLM's tiers do
the work: a block of prompt passes through host memory and becomes a file that is named by the hash of its tokens and of
all tokens before it, with the adapter and the tenant's salt. Engines with the same folder find each other's blocks.

Added here: a limit of the folder, because vLLM's tier never deletes; and copies without CUDA, because vLLM's worker
copies on streams of a GPU. Files hold plain values, no code, but also no checksum, and prompts can be recovered from
them: only the engines' account may have the folder."""

import contextlib
import os
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from vllm.platforms import current_platform
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.fs.manager import FileSystemTierManager
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from engine_agent.engines.vllm.kv_transfer import SCAN_SHARE, StoredBlock, blocks_to_evict, store_bounds


class StoreSpec(TieringOffloadingSpec):  # type: ignore[misc]  # no types
    """Host memory before the files of `LimitedStore`."""

    kv_events_config: Any
    _worker: Any

    def __init__(self, config: Any) -> None:
        # The folder of files already states the model; vLLM would put its whole path into one name. Values differ
        # between devices.
        name = f"{current_platform.get_device_name()}-{config.kv_cache_layout}"
        super().__init__(replace(config, model=replace(config.model, name=name)))
        # Events of this tier name neither parents nor sizes of blocks, so routing could not use them.
        self.kv_events_config = replace(self.kv_events_config, enable_kv_cache_events=False)

    def get_manager(self) -> Any:
        """See vLLM's. The scheduler is built last, so every process has mapped the memory: without a name it cannot
        outlive a killed engine."""
        manager = super().get_manager()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._scheduler_mmap.mmap_path)
        return manager

    def get_worker(self, kv_caches: Any) -> Any:
        if not current_platform.is_cpu():
            return super().get_worker(kv_caches)
        if self._worker is None:
            self._worker = self.create_worker(kv_caches)
        return self._worker

    def create_worker(self, kv_caches: Any) -> Any:
        if not current_platform.is_cpu():
            worker = super().create_worker(kv_caches)
            worker._mmap_region._creator = False  # see `get_manager`
            return worker
        region = SharedOffloadRegion(
            engine_id=self._engine_id,
            num_chunks=self.num_chunks,
            rank=0 if self.replicated_layout else self.config.parallel.rank,
            kv_bytes_per_chunk=self.kv_bytes_per_chunk,
            cpu_page_size=self.cpu_page_size_per_worker,
        )
        region._creator = False
        return CopyingWorker(kv_caches, region)


class CopyingWorker(OffloadingWorker):  # type: ignore[misc]  # no types
    """Copies blocks in the thread that asks for it, between the steps of the model. `kv_connector_extra_config` states
    no chunks of several blocks."""

    def __init__(self, kv_caches: Any, region: Any) -> None:
        self._region, self._groups = region, kv_caches.group_data_refs
        self._live = [each.tensor for each in kv_caches.tensors]
        self._kept = [region.create_next_worker_view(each.page_size_bytes) for each in kv_caches.tensors]
        self._done: list[Any] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        self._copy(job_id, src_spec, dst_spec, self._live, self._kept, src_spec.group_sizes)
        return True

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        self._copy(job_id, src_spec, dst_spec, self._kept, self._live, dst_spec.group_sizes)
        return True

    def _copy(self, job_id: int, src: Any, dst: Any, sources: Any, targets: Any, sizes: Iterable[int]) -> None:
        began_s, at, copied = time.perf_counter(), 0, 0
        from_blocks, to_blocks = (torch.from_numpy(each.block_ids).long() for each in (src, dst))
        for size, refs in zip(sizes, self._groups, strict=True):
            rows = slice(at, at + size)
            for ref in refs:
                page = slice(0, ref.page_size_bytes)
                targets[ref.tensor_idx][to_blocks[rows], page] = sources[ref.tensor_idx][from_blocks[rows], page]
                copied += size * ref.page_size_bytes
            at += size
        self._done.append(TransferResult(job_id, True, copied, time.perf_counter() - began_s))

    def get_finished(self) -> list[Any]:
        done, self._done = self._done, []
        return done

    def wait(self, job_ids: set[int]) -> None:
        """Nothing is under way."""

    def shutdown(self) -> None:
        self._live, self._kept = [], []
        self._region.cleanup()


class LimitedStore(FileSystemTierManager):  # type: ignore[misc]  # no types
    """vLLM's tier of files. `folder` holds the stores of all versions on this machine, `root_dir` is this engine's in
    it. Files are deleted in one thread, the least recently used first; an engine that looks for a deleted one computes
    its tokens again."""

    def __init__(self, *, folder: str, limit_bytes: int, **given: Any) -> None:
        self._folder, self._limit = Path(folder), limit_bytes
        self._unscanned, self._until_scan = 0, limit_bytes // SCAN_SHARE
        super().__init__(**given)
        self._keeper = ThreadPoolExecutor(1, thread_name_prefix="kv-store")
        self._scan = self._keeper.submit(self._evict)

    def submit_store(self, job_metadata: Any) -> None:
        self._unscanned += len(job_metadata.keys) * self._block_size
        if self._unscanned >= self._until_scan and self._scan.done():
            self._unscanned = 0
            self._scan = self._keeper.submit(self._evict)
        super().submit_store(job_metadata)

    def submit_load(self, job_metadata: Any) -> None:
        paths = [self.file_mapper.get_file_name(key) for key in job_metadata.keys]
        self._keeper.submit(_mark_used, paths)
        super().submit_load(job_metadata)

    def _evict(self) -> None:
        files = list(stored_blocks(self._folder))
        found = os.statvfs(self._folder)
        stored, free = sum(each.bytes for each in files), found.f_bavail * found.f_frsize
        limit, self._until_scan = store_bounds(self._limit, stored, free)
        for path in blocks_to_evict(files, limit):
            with contextlib.suppress(OSError):
                path.unlink()
            with contextlib.suppress(OSError):
                path.parent.rmdir()

    def shutdown(self) -> None:
        self._keeper.shutdown(cancel_futures=True)
        super().shutdown()


def _mark_used(paths: Iterable[str]) -> None:
    for path in paths:
        with contextlib.suppress(OSError):
            os.utime(path)


def stored_blocks(folder: Path) -> Iterable[StoredBlock]:
    """Also unfinished files of killed engines. Links are not followed."""
    for place, _, names in os.walk(folder):
        for name in names:
            path = Path(place, name)
            with contextlib.suppress(OSError):
                found = path.lstat()
                yield StoredBlock(path, found.st_blocks * 512, found.st_mtime)
