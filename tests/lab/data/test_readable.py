"""Images as cameras and disks leave them: on their side, cut off, no images at all."""

from __future__ import annotations

import io
import json
import os
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tiny_images import joined, write_tree

from pareback.cli import main
from pareback.lab.data import readable
from pareback.lab.data.folder import Folder
from pareback.lab.data.readable import read_image, unreadable, why_unreadable
from pareback.lab.data.sources import open_source, skipped
from pareback.lab.recipe.schema import DataRecipe
from pareback.runs.folder import result_of

CPU = torch.device("cpu")
#: Of a picture that is 3 wide and 2 high: how each EXIF orientation has to be turned to be upright.
TURNS: dict[int, Any] = {
    1: lambda p: p,
    2: np.fliplr,
    3: lambda p: np.rot90(p, 2),
    4: np.flipud,
    5: lambda p: p.transpose(1, 0, 2),
    6: lambda p: np.rot90(p, -1),
    7: lambda p: np.rot90(p, 2).transpose(1, 0, 2),
    8: np.rot90,
}


def turned(path: Path, orientation: int, pixels: np.ndarray) -> Path:
    image = Image.fromarray(pixels)
    exif = image.getexif()
    exif[0x0112] = orientation
    image.save(path, exif=exif)
    return path


@pytest.mark.parametrize("orientation", TURNS)
def test_photographs_are_upright_as_their_camera_says(tmp_path: Path, orientation: int) -> None:
    """All eight ways a camera can be held; the pixels are those that a viewer shows."""
    pixels = np.random.default_rng(0).integers(0, 256, (2, 3, 3), dtype=np.uint8)
    image = read_image(str(turned(tmp_path / "a.png", orientation, pixels)))
    np.testing.assert_array_equal(np.asarray(image), TURNS[orientation](pixels))


def test_a_folder_s_batches_are_upright(tmp_path: Path) -> None:
    """A photograph on its side gives the same batch as the upright one beside it."""
    write_tree(tmp_path, train=2, test=2)
    pixels = np.random.default_rng(1).integers(0, 256, (16, 20, 3), dtype=np.uint8)
    turned(tmp_path / "val" / "cat" / "0.png", 6, pixels)
    Image.fromarray(np.rot90(pixels, -1).copy()).save(tmp_path / "val" / "cat" / "1.png")
    x, _ = joined(Folder(tmp_path, image_size=7, workers=0).test_batches(batch=4))
    assert torch.equal(x[0], x[1])


def test_a_damaged_note_of_the_camera_does_not_cost_the_image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from PIL import ImageOps

    def broken(image: Any) -> Any:
        raise SyntaxError("no TIFF header")

    monkeypatch.setattr(ImageOps, "exif_transpose", broken)
    Image.new("L", (3, 2), 7).save(tmp_path / "a.png")
    assert read_image(str(tmp_path / "a.png")).size == (3, 2)


# ---------------------------------------------------------------- images that cannot be read


def jpeg() -> bytes:
    """A photograph's worth of bytes."""
    content = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)).save(content, "JPEG")
    return content.getvalue()


@pytest.fixture
def damaged(tmp_path: Path) -> Path:
    """A tree of 12 and 6 images, of which one is cut off, one empty, and one no image."""
    tree = write_tree(tmp_path / "tree")
    (tree / "train" / "cat" / "1.jpg").write_bytes(jpeg()[:1000])
    (tree / "train" / "dog" / "2.png").write_bytes(b"")
    (tree / "val" / "dog" / "0.png").write_bytes(b"<html>not found</html>")
    return tree


def recipe(tree: Path, **changes: Any) -> DataRecipe:
    return DataRecipe("folder", str(tree), batch_size=4, image_size=7, workers=0, **changes)


def test_a_photograph_that_is_whole_can_be_read_and_one_that_is_cut_off_cannot(tmp_path: Path) -> None:
    """Wherever it is cut: the last byte may be missing, which no picture shows, but nothing before the end marker."""
    path, whole = tmp_path / "a.jpg", jpeg()
    path.write_bytes(whole)
    assert why_unreadable(str(path)) == ""
    for length in (0, 10, 300, len(whole) // 2, len(whole) - 200):
        path.write_bytes(whole[:length])
        assert why_unreadable(str(path))
        assert str(path) not in why_unreadable(str(path))


def test_they_are_named_before_the_training(damaged: Path) -> None:
    """Each with its reason, and with what to write."""
    with pytest.raises(ValueError, match="3 of 19 images of .* cannot be read: ") as caught:
        open_source(recipe(damaged), CPU)
    said = str(caught.value)
    for name in ("train/cat/1.jpg", "train/dog/2.png", "val/dog/0.png"):
        assert f"'{name}' (" in said
    assert said.endswith("Replace or remove them, or write data.corrupt=skip to leave them out.")
    assert "\n" not in said


def test_of_many_the_first_are_named(tmp_path: Path) -> None:
    tree = write_tree(tmp_path / "tree")
    for path in sorted((tree / "train").rglob("*.png"))[:7]:
        path.write_bytes(b"")
    with pytest.raises(ValueError, match=r"7 of 18 images .* and 2 more\. Replace"):
        open_source(recipe(tree), CPU)


def test_they_are_left_out_and_counted_on_request(
    damaged: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the header and in result.json, and a run goes on with the same images."""
    source = open_source(recipe(damaged, corrupt="skip"), CPU)
    assert skipped(source) == ("train/cat/1.jpg", "train/dog/2.png", "val/dog/0.png")
    assert (source.size, source.test_size) == (11, 5)
    assert len(joined(source.batches(0, batch=11, seed=0))[1]) == 11
    options = "--data.kind folder --data.image_size 7 --data.workers 0 --data.batch_size 4 --train.epochs 1 --quiet"
    command = ["train", *options.split(), "--data.path", str(damaged), "--out", str(tmp_path / "run")]
    assert main(command) == 2
    assert "write data.corrupt=skip" in capsys.readouterr().err
    assert main([word for word in [*command, "--data.corrupt", "skip"] if word != "--quiet"]) == 0
    assert "5 to test with, 3 left out that cannot be read" in " ".join(capsys.readouterr().out.split())
    result = result_of(tmp_path / "run")
    assert result["images"] == {"train": 11, "test": 5}
    assert result["skipped_images"] == list(skipped(source))


def test_a_class_of_which_none_can_be_read_is_named(tmp_path: Path) -> None:
    tree = write_tree(tmp_path / "tree")
    for path in (tree / "train" / "cat").iterdir():
        path.write_bytes(b"")
    with pytest.raises(ValueError, match="train has no image that can be read for 'cat'"):
        open_source(recipe(tree, corrupt="skip"), CPU)


def test_nothing_is_read_beforehand_on_request(damaged: Path) -> None:
    """Then the first that is come to stops the training."""
    source = open_source(recipe(damaged, corrupt="later"), CPU)
    with pytest.raises(ValueError, match="cannot be read as an image .*: replace or remove it"):
        joined(source.test_batches(batch=6))


def test_a_large_tree_is_looked_at_once(damaged: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And again once a file of it is another one; a note that is damaged, or of other rules, is not believed."""
    monkeypatch.setattr(readable, "_WORTH_NOTING", 3)
    paths = sorted(str(path) for path in damaged.rglob("*.*g"))
    looked: list[str] = []
    monkeypatch.setattr(readable, "why_unreadable", lambda path: (looked.append(path), why_unreadable(path))[1])
    first = unreadable(damaged, paths, threads=2)
    assert (len(first), len(looked)) == (3, 19)
    assert unreadable(damaged, paths, threads=2) == first
    assert len(looked) == 19
    (damaged / "train" / "dog" / "2.png").write_bytes((damaged / "train" / "dog" / "3.png").read_bytes())
    assert len(unreadable(damaged, paths, threads=2)) == 2
    assert len(looked) == 38
    (note,) = (
        path
        for path in (Path(os.environ["XDG_STATE_HOME"]) / "pareback" / "images").iterdir()
        if len(json.loads(path.read_text())) == 2
    )
    note.write_text("[]")
    assert len(unreadable(damaged, paths, threads=2)) == 2
    assert len(looked) == 57
    monkeypatch.setattr(readable, "_RULES", readable._RULES + 1)
    assert len(unreadable(damaged, paths, threads=2)) == 2
    assert len(looked) == 76


def test_a_state_folder_that_cannot_be_written_is_no_matter(
    damaged: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(readable, "_WORTH_NOTING", 3)
    assert len(unreadable(damaged, [str(path) for path in damaged.rglob("*.*g")], threads=1)) == 3


def test_a_terminal_shows_a_bar_and_is_left_as_it_was(damaged: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On standard error, where a table or a program's output does not go."""

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    assert len(unreadable(damaged, [str(path) for path in damaged.rglob("*.*g")], threads=2)) == 3
    assert "looking at images" in terminal.getvalue()


def test_an_interruption_does_not_wait_for_the_rest(damaged: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that have not begun are dropped."""
    monkeypatch.setattr(readable, "_BLOCK", 1)
    looked: list[str] = []

    def interrupted(block: Any) -> Any:
        looked.extend(block)
        time.sleep(0.01)
        raise KeyboardInterrupt

    monkeypatch.setattr(readable, "_reasons", interrupted)
    with pytest.raises(KeyboardInterrupt):
        unreadable(damaged, [str(path) for path in damaged.rglob("*.*g")] * 50, threads=1)
    assert len(looked) < 950


# ---------------------------------------------------------------- pixels of other kinds


@pytest.mark.parametrize("name", ["a.png", "a.tif"])
def test_greys_of_16_bits_keep_their_shades(tmp_path: Path, name: str) -> None:
    """Pillow alone would make everything above 255 white."""
    greys = np.arange(0, 65536, 257, dtype=np.uint16).reshape(16, 16)
    Image.fromarray(greys).save(tmp_path / name)
    assert why_unreadable(str(tmp_path / name)) == ""
    assert np.array_equal(np.asarray(read_image(str(tmp_path / name)))[..., 1], greys // 256)


@pytest.mark.parametrize("kind", [np.int32, np.float32])
def test_pixels_of_32_bits_are_refused_by_name(tmp_path: Path, kind: type) -> None:
    """Nobody knows what is black and what is white in them; Pillow takes shares below 1 for black."""
    tree = write_tree(tmp_path)
    Image.fromarray(np.full((9, 9), 0.5 if kind is np.float32 else 70000, kind)).save(tree / "train/cat/f.tif")
    with pytest.raises(ValueError, match=r"'train/cat/f\.tif' \(its pixels are numbers of 32 bits: save it with 8 or"):
        open_source(recipe(tree), CPU)


def test_palettes_with_transparency_are_read_without_a_warning(tmp_path: Path) -> None:
    palette = Image.new("RGB", (9, 9), (200, 100, 0)).quantize(2)
    palette.save(tmp_path / "a.png", transparency=bytes([0, 128]))
    with warnings.catch_warnings(action="error"):
        assert why_unreadable(str(tmp_path / "a.png")) == ""
        assert read_image(str(tmp_path / "a.png")).getpixel((3, 3)) == (200, 100, 0)


def test_a_link_that_leads_nowhere_has_a_plain_reason(tmp_path: Path) -> None:
    (tmp_path / "a.jpg").symlink_to(tmp_path / "gone.jpg")
    assert why_unreadable(str(tmp_path / "a.jpg")) == "No such file or directory"
