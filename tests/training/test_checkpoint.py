"""Checkpoints: whole or not there, kept by a policy, read without trust."""

from __future__ import annotations

import json
import pickle
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from groupwise.errors import RunError
from groupwise.rundir.files import RunLog
from groupwise.settings.sections import CheckpointSettings
from groupwise.training.checkpoint import files as checkpoint
from groupwise.training.checkpoint.files import (
    Checkpoint,
    RetentionPolicy,
    UnknownFormat,
    Writer,
    load,
    newest,
    save,
)
from groupwise.training.checkpoint.manager import CheckpointManager


def made(step: int = 3, **about: Any) -> Checkpoint:
    return Checkpoint(
        step=step,
        weights={"policy": {"w": torch.arange(6.0).view(2, 3) + step, "b": torch.ones(2)}},
        state={"learner": {"m": torch.full((3,), 0.5)}, "source": {"n": step}, "trainer": {}},
        about=about,
    )


def steps(folder: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in folder.glob("step-*"))


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    path = save(tmp_path, made(config={"seed": 1}), keep=RetentionPolicy())
    found = load(path)
    assert found.step == 3 and found.about == {"config": {"seed": 1}}
    assert torch.equal(found.weights["policy"]["w"], made().weights["policy"]["w"])
    assert torch.equal(found.state["learner"]["m"], torch.full((3,), 0.5))
    assert found.state["source"] == {"n": 3}


def test_the_policy_of_keeping(tmp_path: Path) -> None:
    """Last 2, multiples of 10, the best one (15), and the one before the first step."""
    for step in (0, 5, 10, 15, 20, 25, 30, 35):
        save(tmp_path, made(step), keep=RetentionPolicy(last=2, every=10, best=15))
    assert steps(tmp_path) == [0, 10, 15, 20, 30, 35]


def test_the_same_step_can_be_written_again(tmp_path: Path) -> None:
    save(tmp_path, made(), keep=RetentionPolicy())
    save(tmp_path, made(extra=1), keep=RetentionPolicy())
    assert load(tmp_path / "step-000003").about == {"extra": 1}
    assert {p.name for p in tmp_path.iterdir()} == {"step-000003"}


def test_a_kill_between_two_renames_loses_nothing(tmp_path: Path) -> None:
    """The old one was moved away and the new one not yet put in its place."""
    path = save(tmp_path, made(), keep=RetentionPolicy())
    path.rename(tmp_path / ".replaced-000003")
    (tmp_path / ".writing-000003").mkdir()
    checkpoint.tidy(tmp_path)
    assert {p.name for p in tmp_path.iterdir()} == {"step-000003"}
    assert newest(tmp_path)[0] is not None


@pytest.mark.parametrize("name", ["manifest.json", "weights.safetensors", "state.pt"])
@pytest.mark.parametrize("damage", ["truncated", "flipped", "zeros", "missing", "empty"])
def test_a_damaged_checkpoint_is_skipped_and_named(name: str, damage: str, tmp_path: Path) -> None:
    """What a power cut leaves of files whose names were on disk before their content was."""
    save(tmp_path, made(1), keep=RetentionPolicy())
    file = save(tmp_path, made(2), keep=RetentionPolicy()) / name
    content = file.read_bytes()
    middle = len(content) // 2
    after = {
        "truncated": content[:middle],
        "flipped": content[:middle] + bytes([content[middle] ^ 4]) + content[middle + 1 :],
        "zeros": bytes(len(content)),
        "empty": b"",
    }
    file.unlink()
    if damage != "missing":
        file.write_bytes(after[damage])
    found, skipped = newest(tmp_path)
    assert found is not None and found.step == 1
    assert len(skipped) == 1 and "step-000002" in skipped[0]
    assert "damaged" in skipped[0] or "incomplete" in skipped[0]


def test_a_renamed_checkpoint_is_not_believed(tmp_path: Path) -> None:
    path = save(tmp_path, made(3), keep=RetentionPolicy())
    path.rename(tmp_path / "step-000009")
    assert newest(tmp_path)[0] is None


class Hostile:
    """Runs code when it is unpickled."""

    def __reduce__(self) -> Any:
        return exec, ("raise SystemExit('unpickled')",)


def forge(folder: Path, name: str, content: bytes) -> None:
    """Replace a file of a checkpoint and make all checksums agree."""
    (folder / name).write_bytes(content)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"][name] = checkpoint._digest(folder / name)
    manifest.pop("checksum")
    manifest["checksum"] = checkpoint._checksum(manifest)
    (folder / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize("how", ["pickle", "torch"])
def test_nothing_in_a_checkpoint_is_run(how: str, tmp_path: Path) -> None:
    path = save(tmp_path, made(), keep=RetentionPolicy())
    if how == "pickle":
        content = pickle.dumps(Hostile())
    else:
        torch.save({"learner": Hostile()}, tmp_path / "hostile")
        content = (tmp_path / "hostile").read_bytes()
    forge(path, "state.pt", content)
    with pytest.raises(RunError, match="incomplete"):
        load(path)


def test_names_in_the_manifest_lead_nowhere(tmp_path: Path) -> None:
    path = save(tmp_path, made(), keep=RetentionPolicy())
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["files"] = {"../../etc/passwd": "0"}
    (path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(RunError):
        load(path)


def test_an_older_format_is_read(tmp_path: Path) -> None:
    """Format 2 had one learner, without a name, one state of the trainer, and tensors of the
    optimizer in the order of the parameters."""
    path = save(tmp_path, made(), keep=RetentionPolicy())
    save_file({"w": torch.ones(2)}, path / "weights.safetensors")
    trainer = {"best": 0.5, "best_step": 2, "moved": True, "guard": {"lost": 1}}
    optimizer = {"adam": {"state": {0: {"step": 3}}}, "masters": [torch.ones(1)], "steps": 3}
    learner = {"version": 3, "optimizer": optimizer}
    torch.save({"learner": learner, "source": {}, "trainer": trainer}, path / "state.pt")
    manifest = json.loads((path / "manifest.json").read_text()) | {"format": 2}
    (path / "manifest.json").write_text(json.dumps(manifest))
    for name in ("weights.safetensors", "state.pt"):
        forge(path, name, (path / name).read_bytes())
    found = load(path)
    assert found.weights["policy"]["w"].tolist() == [1.0, 1.0]
    assert found.state["learners"]["policy"] == {
        "version": 3,
        "optimizer": {"moments": {0: {"step": 3}}, "masters": {0: torch.ones(1)}, "steps": 3},
    }
    assert found.state["evaluation"] == {"best": 0.5, "best_step": 2, "last": 3}
    assert found.state["monitor"]["guard"]["bad_steps"] == 1


def test_a_newer_format_is_refused_and_never_skipped(tmp_path: Path) -> None:
    """Going back to an older checkpoint would throw away what the newer one holds."""
    save(tmp_path, made(1), keep=RetentionPolicy())
    path = save(tmp_path, made(2), keep=RetentionPolicy())
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps({**manifest, "format": 99}))
    with pytest.raises(UnknownFormat, match="checkpoint format 99; this version .* reads 2, 3;"):
        newest(tmp_path)


# -- writing in the background ---------------------------------------------------------------------


def test_what_is_written_is_what_it_was_when_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training goes on while the disk is slow, and changes its weights in place."""
    entered, go = threading.Event(), threading.Event()
    plain = checkpoint._write

    def slow(draft: Path, given: Checkpoint) -> None:
        entered.set()
        assert go.wait(60)
        plain(draft, given)

    monkeypatch.setattr(checkpoint, "_write", slow)
    given, writer = made(), Writer(tmp_path)
    start = time.perf_counter()
    writer.write(given, keep=RetentionPolicy())
    assert time.perf_counter() - start < 30 and entered.wait(10)
    given.weights["policy"]["w"].zero_()
    given.state["learner"]["m"].zero_()
    go.set()
    writer.wait()
    found = load(tmp_path / "step-000003")
    assert torch.equal(found.weights["policy"]["w"], made().weights["policy"]["w"])
    assert float(found.state["learner"]["m"][0]) == 0.5


def test_a_failure_in_the_background_is_told_at_the_next_occasion(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    writer = Writer(tmp_path / "file" / "checkpoints")
    writer.write(made(), keep=RetentionPolicy())
    with pytest.raises(RunError, match="could not be written"):
        writer.wait()
    writer.wait()


@pytest.mark.parametrize("call", ["save_file", "torch.save", "fsync"])
def test_a_full_disk_leaves_the_checkpoints_before(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, made(1), keep=RetentionPolicy())

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    place = {"save_file": "save_file", "torch.save": "torch.save", "fsync": "os.fsync"}[call]
    monkeypatch.setattr(f"groupwise.training.checkpoint.files.{place}", full)
    with pytest.raises(RunError, match=r"No space left on device\); free some space"):
        save(tmp_path, made(2), keep=RetentionPolicy())
    assert {p.name for p in tmp_path.iterdir()} == {"step-000001"}


def test_memory_that_ends_in_a_checkpoint_is_an_error_and_no_abort(tmp_path: Path) -> None:
    """safetensors aborts the process where it cannot allocate its buffer."""
    program = f"""
import pathlib, resource, torch
from groupwise.training.checkpoint.files import Checkpoint, RetentionPolicy, save
folder, weights = pathlib.Path({str(tmp_path)!r}), {{"policy": {{"w": torch.zeros(1 << 20)}}}}
kept = Checkpoint(step=1, weights=weights, state={{}})
save(folder, kept, keep=RetentionPolicy())
spare, hog = [bytearray(4096) for _ in range(100)], []
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), resource.RLIM_INFINITY))
for size in (1 << 24, 1 << 20, 1 << 16, 1 << 12, 1 << 8):
    try:
        while True:
            hog.append(bytearray(size))
    except MemoryError:
        pass
del spare
try:
    save(folder, kept, keep=RetentionPolicy())
except Exception as error:
    hog.clear()
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "could not be written (out of memory)" in done.stdout
    assert {p.name for p in tmp_path.iterdir()} == {"step-000001"}


def test_a_folder_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    def write(text: str) -> Any:
        return lambda path: (Path(path) / "a").write_text(text)

    def fail(path: str) -> None:
        (Path(path) / "a").write_text("half")
        raise OSError(28, "No space left on device")

    final = tmp_path / "final"
    checkpoint.replace_folder(final, write("first"))
    checkpoint.replace_folder(final, write("second"))
    assert (final / "a").read_text() == "second"
    with pytest.raises(RunError, match="No space left"):
        checkpoint.replace_folder(final, fail)
    assert (final / "a").read_text() == "second"
    assert {p.name for p in tmp_path.iterdir()} == {"final"}


# -- any bytes at all ------------------------------------------------------------------------------


def check_any_bytes(folder: Path, name: str, content: bytes, forged: bool) -> None:
    whole = folder / "whole"
    if not whole.exists():
        save(folder, made(), keep=RetentionPolicy())
        (folder / "step-000003").rename(whole)
    path = folder / "step-000003"
    shutil.rmtree(path, ignore_errors=True)
    shutil.copytree(whole, path)
    if forged and name != "manifest.json":
        forge(path, name, content)
    else:
        (path / name).write_bytes(content)
    try:
        load(path)
    except RunError:
        pass


ANY = given(
    name=st.sampled_from(["manifest.json", "weights.safetensors", "state.pt"]),
    content=st.one_of(
        st.binary(max_size=200),
        st.recursive(
            st.none() | st.integers() | st.text(max_size=5),
            lambda inner: (
                st.lists(inner, max_size=3)
                | st.dictionaries(
                    st.sampled_from(["format", "step", "files", "about", "checksum", "x"]), inner
                )
            ),
            max_leaves=8,
        ).map(lambda value: json.dumps(value).encode()),
        st.integers(0, 2**32).map(lambda n: n.to_bytes(8, "little") + b'{"w":{"dtype":"F32"}}'),
    ),
    forged=st.booleans(),
)


@ANY
@settings(max_examples=60, deadline=None)
def test_any_bytes_are_a_checkpoint_or_refused(
    tmp_path_factory: pytest.TempPathFactory, name: str, content: bytes, forged: bool
) -> None:
    check_any_bytes(folder_of(tmp_path_factory), name, content, forged)


@pytest.mark.verify
@pytest.mark.timeout(7200)
@ANY
@settings(max_examples=100_000, deadline=None)
def test_very_many_bytes_are_a_checkpoint_or_refused(
    tmp_path_factory: pytest.TempPathFactory, name: str, content: bytes, forged: bool
) -> None:
    check_any_bytes(folder_of(tmp_path_factory), name, content, forged)


def folder_of(factory: pytest.TempPathFactory) -> Path:
    folder = factory.getbasetemp() / "any-bytes"
    folder.mkdir(exist_ok=True)
    return folder


class Enormous:
    """A learner of a model that no disk has room for; its weights have no memory."""

    def __init__(self, count: int) -> None:
        self.count = count

    def trained(self) -> dict[str, torch.Tensor]:
        return {"weight": torch.empty(self.count, device="meta")}


def test_room_for_checkpoints_is_checked_before_the_first_step(tmp_path: Path) -> None:
    run_log = RunLog(tmp_path, settings={})
    manager = CheckpointManager(run_log, settings=CheckpointSettings(), about={})
    said: list[str] = []
    with pytest.raises(RunError, match=r"a checkpoint of this run takes .* GiB are free there"):
        manager.check_room([Enormous(10**16)], log=said.append)  # type: ignore[list-item]
    manager.check_room([Enormous(10)], log=said.append)  # type: ignore[list-item]
    assert not said
    free = shutil.disk_usage(tmp_path).free
    manager.check_room([Enormous(free // 12 // 2)], log=said.append)  # type: ignore[list-item]
    assert "checkpoint.keep_last = 2" in said[0]
