"""Which GPU is meant: CUDA numbers the visible devices, NVML all of them."""

from __future__ import annotations

import pytest

from tunekit.environment import nvml_handle, visible_index


@pytest.mark.parametrize(
    ("visible", "device", "meant"),
    [
        (None, 1, 1),
        ("3,1", 0, 3),
        ("3,1", 1, 1),
        (" 2 , GPU-8932f937 ", 1, "GPU-8932f937"),
        ("MIG-GPU-8932f937/1/0", 0, "MIG-GPU-8932f937/1/0"),
    ],
)
def test_cuda_visible_devices_renumbers(visible: str | None, device: int, meant: int | str) -> None:
    """Case 22: device 1 is the second visible one, whatever its number is to NVML."""
    assert visible_index(device, {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}) == meant


@pytest.mark.parametrize(("visible", "device"), [("", 0), ("0,1", 2)])
def test_a_hidden_device_is_none(visible: str, device: int) -> None:
    with pytest.raises(IndexError, match=f"CUDA device {device} is not visible"):
        visible_index(device, {"CUDA_VISIBLE_DEVICES": visible})


class FakeNvml:
    """NVML with GPUs 0 to 7, and one that it knows by UUID."""

    NVMLError = LookupError

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:
        return f"index {index}"

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if uuid != "GPU-known":
            raise LookupError(uuid)
        return uuid


@pytest.mark.parametrize(("uuid", "meant"), [("known", "GPU-known"), ("unheard", "index 5"), (None, "index 5")])
def test_a_uuid_that_nvml_knows_counts_before_the_index(
    monkeypatch: pytest.MonkeyPatch, uuid: str | None, meant: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    assert nvml_handle(FakeNvml(), 1, uuid) == meant
