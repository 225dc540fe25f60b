"""Pictures on llama.cpp: answers against llama.cpp's own helper, company, sharing, and bad files."""

from __future__ import annotations

import io
import logging
import os
import signal
import struct
import sys
import zlib
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from PIL import Image

import cbatch
from cbatch.backend.llama.bitmaps import pixels_of, size_of
from cbatch.backend.llama.fingerprint import Parts, digest_of_loaded
from cbatch.backend.llama.projector import Projector
from cbatch.bench.synthetic_projector import write_projector
from cbatch.errors import ConfigError, ModelLoadError, PromptError
from cbatch.media import Medium
from cbatch.messages import BatchPrompt
from cbatch.pictures import picture_data, picture_part
from tests.backend.llama.fuzz_media import PICTURES, fuzz
from tests.backend.llama.media import WITH_RIVALS, chat_with, clear_tokens
from tests.oracle.pictures import PlainSeer
from tests.runtime.backends import connections_of, parts_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from numpy.typing import NDArray

    from tests.conftest import SynthFactory

pytestmark = [pytest.mark.real, pytest.mark.own_library]

GREEDY = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}
SHOWN = "Look: <__media__> What is it? <__media__> And this?"


def picture(seed: int, width: int = 90, height: int = 60) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8)


def png(seed: int) -> bytes:
    file = io.BytesIO()
    Image.fromarray(picture(seed)).save(file, "PNG")
    return file.getvalue()


def photo(seed: int) -> bytes:
    file = io.BytesIO()
    Image.fromarray(picture(seed, 1500, 1000)).save(file, "JPEG")
    return file.getvalue()


chat = partial(chat_with, "image")


@pytest.fixture(scope="module")
def projector(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_projector(tmp_path_factory.mktemp("projectors") / "p.gguf", 64)


@pytest.fixture(scope="module")
def seeing(showing_model: Path, projector: Path) -> Iterator[cbatch.Engine]:
    with cbatch.load(showing_model, mmproj=projector, parallel=4, ctx_per_seq=256) as engine:
        yield engine


@pytest.mark.parametrize("kind", ["llava", "llava-tiles"])
def test_answer_is_that_of_llama_cpps_own_helper(
    showing_model: Path, tmp_path: Path, kind: str
) -> None:
    path = write_projector(tmp_path / "p.gguf", 64, kind=kind, seed=1)
    pictures = [picture(0), picture(1, 200, 70)]
    with PlainSeer(showing_model, path) as plain:
        expected = plain.answer(SHOWN, pictures, 8)
        thrice = plain.answer("Look: <__media__><__media__><__media__> Hm?", pictures[:1] * 3, 8)
    first, middle, last = SHOWN.split("<__media__>")
    with cbatch.load(showing_model, mmproj=path, parallel=2, ctx_per_seq=512) as engine:
        asked = chat(first, pictures[0], middle, pictures[1], last)
        [result] = engine.run([asked], options=GREEDY).results()
        [again] = engine.run([chat("Look: ", *pictures[:1] * 3, " Hm?")], options=GREEDY).results()
    assert result.token_ids == expected
    assert again.token_ids == thrice
    assert result.usage.image_tokens % 16 == 0
    assert 32 <= result.usage.image_tokens < result.usage.prompt_tokens


def test_template_that_turns_messages_round_keeps_pictures_in_their_places(
    synth: SynthFactory, projector: Path
) -> None:
    source = "{% for m in messages|reverse %}{{ m.content }}{% endfor %} Hm?"
    model = synth("test", tied=False, metadata={"tokenizer.chat_template": source})
    first, second = chat("One:", picture(0)), chat("Two:", picture(1))
    with cbatch.load(model, mmproj=projector, parallel=1, ctx_per_seq=256) as engine:
        [turned] = engine.run([[*second, *first]], options=GREEDY).results()
        [plain] = engine.run(
            [chat("One:", picture(0), "Two:", picture(1))], options=GREEDY
        ).results()
    assert turned.token_ids == plain.token_ids


def test_picture_in_many_chats_is_encoded_and_computed_once(seeing: cbatch.Engine) -> None:
    projector, before = parts_of(seeing).backend.projector, seeing.stats()
    n_encoded = projector.n_encoded
    asked = [chat("Look:", picture(77), f"Question {i}?") for i in range(20)]
    results = seeing.run(asked, options=GREEDY).results(return_errors=True)
    assert projector.n_encoded == n_encoded + 1
    after = seeing.stats()
    n_computed = after.n_prompt_tokens - before.n_prompt_tokens
    assert n_computed < sum(r.usage.prompt_tokens for r in results) / 2
    assert {r.usage.cached_tokens > 16 for r in results[4:]} == {True}


def test_options_that_know_no_picture_work_beside_one(seeing: cbatch.Engine) -> None:
    options = {
        **GREEDY,
        "repeat_penalty": 1.3,
        "n": 2,
        "logprobs": 2,
        "json_schema": {"type": "integer"},
    }
    [result] = seeing.run(
        [chat(picture(1), "How many?")], options=options | {"max_tokens": 3}
    ).results(return_errors=True)
    assert result.error is None
    assert len(result.choices) == 2
    assert int(result.text) is not None


def _animated() -> bytes:
    file = io.BytesIO()
    frames = [Image.fromarray(picture(i)) for i in range(2)]
    frames[0].save(file, "GIF", save_all=True, append_images=frames[1:])
    return file.getvalue()


def _huge(n_side: int) -> bytes:
    file = io.BytesIO()
    Image.new("1", (n_side, n_side)).save(file, "PNG")
    return file.getvalue()


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"no picture", "none of PNG, JPEG"),
        (png(0)[:200], "cannot be decoded|damaged"),
        (_animated(), "animated"),
        (_huge(40_000), "more than 67,108,864 pixels"),
        (_huge(9000), "9,000 × 9,000 pixels; at most 67,108,864"),
        (b"\x89PNG\r\n\x1a\n" + bytes(40), "none of|cannot be decoded"),
        (b"P6 3 3 255 " + bytes(27), "none of"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "none of"),
    ],
    ids=["text", "cut", "animated", "huge", "large", "header", "ppm", "svg"],
)
def test_bad_picture_fails_its_own_request(seeing: cbatch.Engine, data: bytes, words: str) -> None:
    good, bad = seeing.run([chat(png(0), "Hm?"), chat(data, "Hm?")], options=GREEDY).results(
        return_errors=True
    )
    assert good.error is None
    assert isinstance(bad.error, PromptError)
    with pytest.raises(PromptError, match=words):
        raise bad.error


def test_text_beside_a_picture_has_the_scores_that_it_has_alone(seeing: cbatch.Engine) -> None:
    text = BatchPrompt(tokens=[3 + i % 200 for i in range(150)], options={"prompt_logprobs": 0})
    seeing.run([chat(png(1), "what?")], options=GREEDY).results()  # its rows are kept
    alone = seeing.run([text], options={"max_tokens": 1}).results()[0]
    for i in range(3):
        shown = BatchPrompt(chat(f"{i} is", png(1), "what?"))
        _, beside = seeing.run([shown, text], options=GREEDY).results()
        assert beside.prompt_logprobs is not None
        assert alone.prompt_logprobs is not None
        found = zip(beside.prompt_logprobs[1:], alone.prompt_logprobs[1:], strict=True)
        # steps with other kinds of rows round differently: by up to 0.14; a wrong token is 2.9 away on average
        assert all(a and b and abs(a.logprob - b.logprob) < 0.5 for a, b in found)


@pytest.mark.parametrize("data", [photo(5000)[:-9000], b"no picture"])
def test_error_of_a_picture_keeps_nothing_of_it_in_memory(
    seeing: cbatch.Engine, data: bytes
) -> None:
    [bad] = seeing.run([chat(data, "Hm?")], options=GREEDY).results(return_errors=True)
    error: BaseException | None = bad.error
    assert isinstance(error, PromptError)
    while error is not None:
        assert error.__traceback__ is None
        error = error.__cause__ or error.__context__


def test_gray_of_16_bits_has_the_pixels_of_8() -> None:
    gray = np.arange(60 * 90, dtype=np.uint16).reshape(60, 90) * 12
    deep, flat = io.BytesIO(), io.BytesIO()
    Image.fromarray(gray).save(deep, "PNG")
    Image.fromarray((gray >> 8).astype(np.uint8)).save(flat, "PNG")
    assert (pixels_of(deep.getvalue()) == pixels_of(flat.getvalue())).all()


def test_photograph_with_others_behind_it_is_the_first() -> None:
    first, second = (Image.fromarray(picture(i)) for i in range(2))
    file, alone = io.BytesIO(), io.BytesIO()
    first.save(file, "MPO", save_all=True, append_images=[second])
    first.save(alone, "JPEG")
    assert (pixels_of(file.getvalue()) == pixels_of(alone.getvalue())).all()


def test_images_in_memory_have_any_colours(seeing: cbatch.Engine) -> None:
    image = Image.fromarray(picture(0))
    asked = [chat(image.convert(mode), "Hm?") for mode in ("CMYK", "YCbCr", "RGB")]
    assert [r.error for r in seeing.run(asked, options=GREEDY).results()] == [None] * 3
    with pytest.raises(ConfigError, match=r"messages\[0\] has an image that cannot be read"):
        seeing.run([chat(np.zeros((0, 5, 3), np.uint8), "Hm?")])


@pytest.mark.parametrize(
    ("kind", "orientation"),
    [*zip(["JPEG", "PNG", "WEBP"] * 3, [1, 2, 3, 4, 5, 6, 7, 8, 6], strict=True)],
)
def test_size_is_that_of_the_pixels(kind: str, orientation: int) -> None:
    exif, file = Image.Exif(), io.BytesIO()
    exif[0x0112] = orientation
    Image.fromarray(picture(1)).save(file, kind, exif=exif)
    data = file.getvalue()
    assert size_of(data) == pixels_of(data).shape[1::-1]


@pytest.mark.parametrize(("type", "value"), [(2, b"6\0\0\0"), (3, b"\t\0\0\0"), (3, b"\0\0\0\0")])
def test_odd_orientation_is_none(type: int, value: bytes) -> None:
    tag = struct.pack("<HHHI4s", 1, 0x0112, type, 1, value)
    file = io.BytesIO()
    Image.fromarray(picture(1)).save(file, "JPEG", exif=b"Exif\0\0II*\0\x08\0\0\0" + tag + bytes(4))
    assert size_of(file.getvalue()) == pixels_of(file.getvalue()).shape[1::-1] == (90, 60)


@pytest.mark.parametrize("mark", [b"eXIf", b"exif", b"xmp"])
def test_size_of_a_png_is_told_without_decoding_it(
    mark: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = png(1)
    at = data.index(b"IDAT") + 4
    spoiled = data[:at] + mark + data[at + len(mark) :]  # what it would be in pixels by chance
    monkeypatch.setattr(Image.Image, "load", lambda _: pytest.fail("decoded"))
    assert size_of(spoiled) == (90, 60)


@pytest.mark.parametrize(
    ("kind", "n_before", "part"),
    [
        ("JPEG", 2, b"\xff\xfe\0\2"),  # a comment
        ("JPEG", 2, b"\xff"),
        ("PNG", 33, b"\0\0\0\0teSt" + zlib.crc32(b"teSt").to_bytes(4, "big")),
    ],
)
def test_file_of_too_many_empty_parts_is_refused(kind: str, n_before: int, part: bytes) -> None:
    file = io.BytesIO()
    Image.new("RGB", (40, 40)).save(file, kind)
    begin, rest = file.getvalue()[:n_before], file.getvalue()[n_before:]
    assert size_of(begin + 100 * part + rest) == (40, 40)
    for read in (size_of, pixels_of):
        with pytest.raises(PromptError, match="too many parts: it needs more than 262,144 reads"):
            read(begin + 270_000 * part + rest)


def test_data_url_has_words_in_any_case() -> None:
    part = {"type": "image_url", "image_url": {"url": "DATA:image/PNG;BASE64,AAAA"}}
    assert picture_data(picture_part("it", part)) == bytes(3)


def test_fuzzed_files_neither_crash_nor_hang(seeing: cbatch.Engine) -> None:
    for ended in fuzz(seeing, PICTURES, 30, seed=9):
        assert not ended.keys() - {"answer", "PromptError"}


def test_prompt_that_ends_with_a_picture_is_refused(seeing: cbatch.Engine) -> None:
    [result] = seeing.run([chat("Look:", picture(0))], options=GREEDY).results(return_errors=True)
    assert "ends with a picture" in str(result.error)


def test_pictures_that_do_not_fit_are_not_encoded(seeing: cbatch.Engine) -> None:
    projector = parts_of(seeing).backend.projector
    n_encoded = projector.n_encoded
    asked = chat(*(picture(1000 + i) for i in range(60)), "Hm?")
    [result] = seeing.run([asked], options=GREEDY).results(return_errors=True)
    assert isinstance(result.error, cbatch.PromptTooLongError)
    assert "at least 257" in str(result.error)  # the first 16 pictures have 256 rows
    assert seeing.count_tokens(chat(picture(2000), "Hm?")) > 16
    assert projector.n_encoded == n_encoded


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"prompt_logprobs": 0}, "prompt_logprobs cannot be used with pictures or sound"),
        ({"cache_key": "k"}, "cache_key cannot be used with pictures or sound"),
    ],
)
def test_options_that_look_at_each_token_are_refused(
    seeing: cbatch.Engine, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        seeing.run([chat(picture(0), "Hm?")], options={**GREEDY, **options})


def test_model_without_a_projector_takes_no_media(showing_model: Path) -> None:
    sound = chat_with("audio", np.zeros(160, np.float32), "Hm?")
    with cbatch.load(showing_model, parallel=1, ctx_per_seq=64) as engine:
        for asked in (chat(picture(0), "Hm?"), sound):
            with pytest.raises(ConfigError, match="load it with mmproj"):
                engine.run([asked])


def test_wrong_projector_is_refused_by_name(showing_model: Path, tmp_path: Path) -> None:
    wide = write_projector(tmp_path / "wide.gguf", 128)
    text = tmp_path / "text.gguf"
    text.write_text("no model")
    for path, words in (
        (wide, "wide.gguf is not a projector of this model.*mismatch"),
        (showing_model, "has no encoder of pictures or sound"),
        (text, "text.gguf"),
        (tmp_path / "none.gguf", "none.gguf"),
    ):
        with pytest.raises((ModelLoadError, ConfigError), match=words):
            cbatch.load(showing_model, mmproj=path, parallel=1, ctx_per_seq=64)


@pytest.mark.skipif(sys.platform == "win32", reason="needs signals")
def test_workers_killed_amid_pictures_cost_no_answer(
    showing_model: Path, projector: Path, seeing: cbatch.Engine
) -> None:
    asked = [chat("Look:", photo(i % 20), f"What {i}?") for i in range(24)]
    greedy = {**GREEDY, **WITH_RIVALS}
    alone = seeing.run(asked, options=greedy).results()
    with cbatch.load(
        showing_model, mmproj=projector, parallel=2, ctx_per_seq=256, replicas=2
    ) as engine:
        items = [BatchPrompt(chat, id=str(i)) for i, chat in enumerate(asked)]
        done = engine.run(items, options=greedy, ask_again=True).as_completed()
        found = [next(done)]
        for i, worker in enumerate(connections_of(engine)):
            found += islice(done, 4 * i)
            os.kill(worker.link.pid, signal.SIGKILL)
        found += done
    found.sort(key=lambda result: int(result.id))
    assert [r.id for r in found] == [str(i) for i in range(24)]
    tokens, expected = clear_tokens(found, alone)
    assert tokens == expected


def test_pictures_encoded_in_many_threads_are_encoded_once_each(
    seeing: cbatch.Engine, projector: Path
) -> None:
    backend, media = parts_of(seeing).backend, [Medium(photo(3000 + i)) for i in range(4)]
    n_encoded, found = backend.projector.n_encoded, [*map(backend.projector.picture, media)]
    with ThreadPoolExecutor(3) as threads:
        [*threads.map(backend.projector.encode, [found, found[::-1], found[2:]])]
    assert backend.projector.n_encoded == n_encoded + 4
    with closing(Projector(backend.model, str(projector), 1, n_ubatch=512)) as alone:
        for medium, known in zip(media, found, strict=True):
            expected = alone.picture(medium)
            alone.encode([expected])
            for rows, others in zip(known.rows, expected.rows, strict=True):
                assert rows.values is not None
                assert others.values is not None
                assert np.abs(rows.values - others.values).max() < 1e-5


def test_projector_that_is_replaced_amid_its_load_is_refused(
    seeing: cbatch.Engine, projector: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "projector.gguf"
    path.write_bytes(projector.read_bytes())

    def replaced(parts: Parts) -> str:
        os.utime(path, (1, 1))
        return digest_of_loaded(parts)

    monkeypatch.setattr("cbatch.backend.llama.projector.digest_of_loaded", replaced)
    with pytest.raises(ModelLoadError, match="was replaced while it was loaded"):
        Projector(parts_of(seeing).backend.model, str(path), 1, n_ubatch=512)


def test_warning_about_a_picture_is_no_reason_of_a_death(
    showing_model: Path, projector: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        cbatch.load(showing_model, mmproj=projector, parallel=1, replicas=1) as engine,
        caplog.at_level(logging.WARNING, "cbatch"),
    ):
        [result] = engine.run([chat(_huge(9500), "Hm?")]).results(return_errors=True)
        assert "9,500 × 9,500" in str(result.error)
        os.kill(connections_of(engine)[0].link.pid, signal.SIGKILL)
        engine.submit("Hm?", options=GREEDY).result()
    [death] = [m for m in caplog.messages if "died" in m]
    assert "ended by SIGKILL" in death
    assert "Warning" not in death


def test_other_projector_gives_other_answers(
    showing_model: Path, tmp_path: Path, seeing: cbatch.Engine
) -> None:
    other = write_projector(tmp_path / "p.gguf", 64, seed=1)
    with cbatch.load(showing_model, mmproj=other, parallel=4, ctx_per_seq=256) as engine:
        told, known = engine.fingerprint, seeing.fingerprint
    assert {name for name in known if told[name] != known[name]} == {"projector"}
