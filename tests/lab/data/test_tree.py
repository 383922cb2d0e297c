"""Which files of a tree are its images, and what is said of those that are left out."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from PIL import Image
from tiny_images import write_tree
from torchvision.datasets import ImageFolder

from pareback.lab.data.folder import EvaluationFolder, Folder
from pareback.lab.data.tree import held_out_of_classes, samples_of


def opened(path: Path, share: float = 0.0) -> Folder:
    return Folder(path, image_size=7, workers=0, val_share=share)


def test_images_of_every_usual_name_count(tmp_path: Path) -> None:
    """None is passed over because of its ending, whatever the case; what Pillow cannot read is found later, by name."""
    write_tree(tmp_path)
    image, cats = Image.new("RGB", (9, 9)), tmp_path / "train" / "cat"
    for name, form in (("a.gif", "GIF"), ("b.JFIF", "JPEG"), ("c.jpe", "JPEG"), ("d e é.WebP", "WEBP")):
        image.save(cats / name, format=form)
    (cats / "f.HEIC").write_bytes(b"no image")
    (cats / "notes.txt").write_text("no image either")
    assert opened(tmp_path).size == 12 + 5
    with pytest.raises(ValueError, match=r"1 of 23 images of .* cannot be read: 'train/cat/f\.HEIC' \(cannot identify"):
        Folder(tmp_path, image_size=7, workers=0, corrupt="stop")


def test_links_are_followed_but_not_in_a_circle(tmp_path: Path) -> None:
    """A link to a folder above would fill a class with images of all, many times."""
    write_tree(tmp_path / "tree")
    write_tree(tmp_path / "other", train=2)
    cats = tmp_path / "tree" / "train" / "cat"
    (cats / "more").symlink_to(tmp_path / "other" / "train" / "cat")
    (cats / "single.png").symlink_to(tmp_path / "other" / "train" / "dog" / "0.png")
    assert opened(tmp_path / "tree").size == 12 + 2 + 1
    (cats / "up").symlink_to("..")
    with pytest.raises(ValueError, match=r"cat/up is a link to a folder that it lies in, which has no end: remove it"):
        opened(tmp_path / "tree")


def test_the_order_is_torchvision_s(tmp_path: Path) -> None:
    """Stored runs know their images by it."""
    write_tree(tmp_path)
    for name in ("b/deep", "a b", "b"):
        shutil.copytree(tmp_path / "val" / "cat", tmp_path / "train" / "cat" / name, dirs_exist_ok=True)
    assert samples_of(tmp_path / "train")[1] == ImageFolder(tmp_path / "train").samples


def test_images_beside_the_classes_are_mentioned(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_tree(tmp_path)
    shutil.copy(tmp_path / "train" / "cat" / "0.png", tmp_path / "train" / "loose.PNG")
    assert opened(tmp_path).size == 12
    assert f"1 image of {tmp_path / 'train'} is in no class's folder and left out: 'loose.PNG'." in caplog.text


def test_the_test_images_may_be_called_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A folder test/ is used where there is no val/, with a share held out and without; of both, one is mentioned."""
    write_tree(tmp_path)
    named_val = opened(tmp_path).test_size
    (tmp_path / "val").rename(tmp_path / "test")
    assert opened(tmp_path).test_size == opened(tmp_path, 0.34).test_size == named_val == 6
    assert not caplog.text
    shutil.copytree(tmp_path / "test", tmp_path / "val")
    assert opened(tmp_path).test_size == 6
    assert f"The images of val/ are the test here; for the others: pareback evaluate RUN --data.path {tmp_path}" in (
        caplog.text
    )


def test_a_share_that_does_not_divide_names_one_that_does() -> None:
    """Not the one that was written."""
    four = [(f"/t/{name}/{n}.png", label) for label, name in enumerate("ab") for n in range(4)]
    with pytest.raises(ValueError, match=r"val_share=0\.1 of 8 .* holds out 0, .*: write data\.val_share=0\.2\."):
        held_out_of_classes(four, Path("/t"), 0.1)
    assert len(held_out_of_classes(four, Path("/t"), 0.2)[1]) == 2
    with pytest.raises(ValueError, match=r"there are too few for any share\."):
        held_out_of_classes([("/t/a/0.png", 0), ("/t/b/0.png", 1)], Path("/t"), 0.1)


def test_classes_too_small_to_have_one_held_out_are_mentioned(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_tree(tmp_path)
    for image in list((tmp_path / "train" / "dog").iterdir())[1:]:
        image.unlink()
    assert (opened(tmp_path, 0.3).size, opened(tmp_path, 0.3).val_size) == (5, 2)
    assert "data.val_share=0.3 holds out no image of 'dog', which the accuracy on val says nothing of" in caplog.text


def test_a_test_of_which_no_image_can_be_read_is_refused(tmp_path: Path) -> None:
    """Its accuracy would be no number."""
    write_tree(tmp_path)
    for image in (tmp_path / "val").rglob("*.png"):
        image.write_bytes(b"")
    with pytest.raises(ValueError, match=r"val has no image that can be read: replace them, or remove the folder"):
        Folder(tmp_path, image_size=7, workers=0, corrupt="skip")


def test_an_empty_folder_is_a_class_without_images_to_measure_on(tmp_path: Path) -> None:
    write_tree(tmp_path)
    shutil.rmtree(tmp_path / "val" / "cat")
    (tmp_path / "val" / "cat").mkdir()
    assert EvaluationFolder(tmp_path, ("cat", "dog")).test_size == 3
    shutil.rmtree(tmp_path / "val" / "dog")
    with pytest.raises(ValueError, match="val has no image for 'cat'"):
        EvaluationFolder(tmp_path, ("cat", "dog"))
