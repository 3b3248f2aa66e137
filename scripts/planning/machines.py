"""GPUs: what they hold and what they could compute."""

from __future__ import annotations

from dataclasses import dataclass

from training.device import PEAK_FLOPS

GB, MB = 10**9, 10**6
CONTEXT_BYTES = 1 * GB  # CUDA's context and libraries, cuBLAS' workspace, NCCL's buffers
HOST_BYTES = 35 * GB // 100  # Python with torch and its imports, in CPU runs of tests/scripts/test_plan.py


@dataclass(frozen=True)
class Machine:
    """What one process has to itself."""

    title: str
    memory: int | None
    """bytes, those of the data sheet; None: not known"""
    peak_flops: float | None
    """dense bfloat16 operations a second; None: not known"""

    @property
    def on_gpu(self) -> bool:
        return self.memory is not None

    @property
    def overhead(self) -> int:
        """Bytes that are taken before the first tensor (an assumption)."""
        return CONTEXT_BYTES if self.on_gpu else HOST_BYTES


# Memory from NVIDIA's data sheets, GB taken as 1e9 bytes: less than the devices report.
MACHINES = {
    "h100": Machine("H100 SXM 80 GB", 80 * GB, PEAK_FLOPS["H100"]),
    "h100-pcie": Machine("H100 PCIe 80 GB", 80 * GB, PEAK_FLOPS["H100 PCIe"]),
    "h200": Machine("H200 141 GB", 141 * GB, PEAK_FLOPS["H200"]),
    "b200": Machine("B200 180 GB", 180 * GB, PEAK_FLOPS["B200"]),
    "a100-80": Machine("A100 80 GB", 80 * GB, PEAK_FLOPS["A100"]),
    "a100-40": Machine("A100 40 GB", 40 * GB, PEAK_FLOPS["A100"]),
    "l40s": Machine("L40S 48 GB", 48 * GB, PEAK_FLOPS["L40S"]),
    "4090": Machine("GeForce RTX 4090 24 GB", 24 * GB, 165.2e12),  # Ada white paper, float32 accumulation
    "cpu": Machine("CPU", None, None),
}
