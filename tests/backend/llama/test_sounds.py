"""Sounds on llama.cpp: answers against llama.cpp's own helper, company, sharing, rates, and bad files."""

from __future__ import annotations

import io
import threading
from contextlib import closing
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import soundfile

import cbatch
from cbatch.backend.llama.projector import Projector
from cbatch.backend.llama.waves import samples_of
from cbatch.bench.synthetic_projector import SOUND_KINDS, write_projector
from cbatch.errors import ConfigError, PromptError
from cbatch.media import Medium
from cbatch.support.moments import NobodyWaitsError, pausing
from tests.backend.llama.fuzz_media import SOUNDS, fuzz
from tests.backend.llama.media import chat_with
from tests.oracle.pictures import PlainSeer
from tests.runtime.backends import PATIENCE_S, parts_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from numpy.typing import NDArray


pytestmark = [pytest.mark.real, pytest.mark.own_library]

GREEDY = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}
RATE = 16_000


def tone(seed: int, seconds: float = 1.0, rate: int = RATE) -> NDArray[np.float32]:
    """A few sines under noise."""
    draw, at = np.random.default_rng(seed), np.arange(int(seconds * rate)) / rate
    sines = sum(np.sin(2 * np.pi * f * at) for f in draw.uniform(80, 3000, 4))
    samples: NDArray[np.float32] = (sines * 0.1 + draw.normal(0, 0.02, len(at))).astype(np.float32)
    return samples


def file_of(samples: NDArray[np.float32], rate: int = RATE, kind: str = "WAV", **how: Any) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, samples, rate, format=kind, **how)
    return file.getvalue()


chat = partial(chat_with, "audio")


@pytest.fixture(scope="module")
def projector(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_projector(tmp_path_factory.mktemp("ears") / "p.gguf", 64, kind=SOUND_KINDS[0])


@pytest.fixture(scope="module")
def hearing(showing_model: Path, projector: Path) -> Iterator[cbatch.Engine]:
    with cbatch.load(showing_model, mmproj=projector, parallel=4, ctx_per_seq=256) as engine:
        yield engine


@pytest.mark.parametrize("kind", SOUND_KINDS)
def test_answer_is_that_of_llama_cpps_own_helper(
    showing_model: Path, tmp_path: Path, kind: str
) -> None:
    path = write_projector(tmp_path / "p.gguf", 64, kind=kind, seed=1)
    sounds = [tone(0), tone(1, 31.0)]  # the second has two parts
    with PlainSeer(showing_model, path) as plain:
        expected = plain.answer("Hear: <__media__> What is it? <__media__> And this?", sounds, 8)
        twice = plain.answer("Hear: <__media__><__media__> Hm?", sounds[:1] * 2, 8)
    with cbatch.load(showing_model, mmproj=path, parallel=2, ctx_per_seq=512) as engine:
        asked = chat("Hear: ", sounds[0], " What is it? ", sounds[1], " And this?")
        [result] = engine.run([asked], options=GREEDY).results()
        [again] = engine.run([chat("Hear: ", *sounds[:1] * 2, " Hm?")], options=GREEDY).results()
    assert result.token_ids == expected
    assert again.token_ids == twice
    assert (result.usage.audio_tokens, result.usage.image_tokens) == (90, 0)
    assert result.usage.prompt_tokens > 90


def test_sound_in_many_chats_is_encoded_once(hearing: cbatch.Engine) -> None:
    projector = parts_of(hearing).backend.projector
    n_encoded, data = projector.n_encoded, file_of(tone(77))
    asked = [chat("Hear:", data, f"Question {i}?") for i in range(12)]
    results = hearing.run(asked, options=GREEDY).results()
    assert {r.usage.audio_tokens for r in results} == {30}
    assert projector.n_encoded == n_encoded + 1


def test_files_have_the_answer_of_their_samples(hearing: cbatch.Engine, tmp_path: Path) -> None:
    samples = tone(3)
    whole = [
        file_of(samples, subtype="FLOAT"),
        file_of(np.stack([samples] * 2, 1), subtype="FLOAT"),
    ]
    path = tmp_path / "a.wav"
    path.write_bytes(whole[0])
    asked = [chat(given, "Hm?") for given in (samples, path, *whole)]
    others = [file_of(samples, kind=kind) for kind in ("WAV", "FLAC", "OGG", "MP3")]
    others += [file_of(samples[:n]) for n in (1, 2, 200, 201)]
    asked += [chat(given, "Hm?") for given in others]
    results = hearing.run(asked, options=GREEDY).results()
    assert len({r.token_ids for r in results[:4]}) == 1
    assert {r.usage.audio_tokens for r in results} == {30}


@pytest.mark.parametrize("rate", [8_000, 44_100, 48_000])
def test_any_rate_becomes_that_of_the_model(rate: int) -> None:
    at = np.sin(2 * np.pi * 440 * np.arange(2 * rate) / rate).astype(np.float32)
    found = samples_of(file_of(at, rate, subtype="FLOAT"), RATE)
    assert len(found) == 2 * RATE
    expected = np.sin(2 * np.pi * 440 * np.arange(2 * RATE) / RATE)
    middle = slice(RATE // 2, -RATE // 2)  # a filter has no samples before the first
    assert np.abs(found - expected)[middle].max() < 0.01


def _with_rate(rate: int) -> bytes:
    data = bytearray(file_of(tone(0)))
    data[24:28] = rate.to_bytes(4, "little")
    return bytes(data)


def _short_end() -> bytes:
    """OGG whose last page says that it ends at the first sample."""
    return file_of(tone(0, 3), kind="OGG") + b"OggS\0\4" + (1).to_bytes(8, "little")


def _many_samples() -> bytes:
    """FLAC that says it has an hour of eight channels at 655,350 Hz."""
    data = bytearray(file_of(np.zeros((4096, 8), np.float32), 48_000, kind="FLAC"))
    told = int.from_bytes(data[18:26], "big") & (2**44 - 2**36)
    data[18:26] = (655_350 << 44 | told | 3599 * 655_350).to_bytes(8, "big")
    return bytes(data)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"no sound", "none of WAV, MP3"),
        (b"#!AMR\n" + bytes(400), "none of WAV, MP3"),
        (file_of(tone(0))[:2000], "cut off: its file has 2,000 of 32,044 bytes"),
        (file_of(tone(0), kind="FLAC")[:4000], "cut off|cannot be decoded"),
        (file_of(tone(0), kind="OGG")[:1000], "cannot be decoded"),
        (file_of(tone(0)[:0]), "empty: its file has no samples"),
        (b"RIFF\x00\x00\x00\x00WAVE" + bytes(60), "cannot be decoded"),
        (file_of(np.zeros((400, 9), np.float32)), "9 channels; at most 8"),
        (_with_rate(500), "500 samples per second"),
        (_with_rate(3_000_000), "3,000,000 samples per second"),
        (
            file_of(np.zeros(3601 * 1000, np.float32), 1000, kind="FLAC"),
            "longer than 3,600 seconds",
        ),
        (_short_end(), "OGG file ends at sample 1, but the first sound has more"),
        (_many_samples(), "8 channels at 655,350 Hz; at most 345,600,000 are allowed"),
        (file_of(tone(0) * np.float32(np.nan), subtype="FLOAT"), "not finite numbers"),
        (file_of(tone(0) * 30_000, subtype="FLOAT"), "must be from -1 to 1"),
    ],
    ids=[
        *("text", "amr", "cut-wav", "cut-flac", "cut-ogg", "empty", "header", "channels"),
        *("slow", "fast", "long", "end", "many", "nan", "loud"),
    ],
)
def test_bad_sound_fails_its_own_request(hearing: cbatch.Engine, data: bytes, words: str) -> None:
    asked = [chat(file_of(tone(0)), "Hm?"), chat(data, "Hm?")]
    good, bad = hearing.run(asked, options=GREEDY).results(return_errors=True)
    assert good.error is None
    with pytest.raises(PromptError, match=words):
        raise bad.error or AssertionError


class EndlessFile:
    """Has more than its header says."""

    frames, samplerate, channels, format = 1, RATE, 4, "OGG"

    def __enter__(self) -> EndlessFile:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def read(self, n: int, **how: Any) -> NDArray[np.float32]:
        return np.zeros((n, self.channels), np.float32)


def test_file_is_decoded_as_far_as_its_header_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soundfile, "SoundFile", lambda _: EndlessFile())
    with pytest.raises(PromptError, match="its header says 1 samples, but it has more"):
        samples_of(b"OggS", RATE)


@pytest.mark.parametrize("rate", [RATE, 22_050])
def test_file_that_nobody_waits_for_is_decoded_no_further(rate: int) -> None:
    pauses = count()

    def leave() -> None:
        if next(pauses) == 3:
            raise NobodyWaitsError

    with pytest.raises(NobodyWaitsError), pausing(leave):
        samples_of(file_of(tone(0, 60, rate), rate), RATE)
    assert next(pauses) == 4


def test_sound_that_was_broken_off_or_held_up_has_the_bits_it_has_alone(
    hearing: cbatch.Engine, projector: Path
) -> None:
    model, encoder = parts_of(hearing).backend.model, parts_of(hearing).backend.projector
    media = [Medium(file_of(tone(s, n)), is_sound=True) for s, n in ((91, 95.0), (92, 31.0))]
    with closing(Projector(model, str(projector), 2, n_ubatch=512)) as plain:
        alone = [plain.picture(medium) for medium in media]
        plain.encode(alone)
    long, short = map(encoder.picture, media)
    n_encoded = encoder.n_encoded

    def turn() -> None:
        if long.rows[0].values is not None and not short.is_encoded:
            with pausing(bool):
                encoder.encode([short])
        if long.rows[1].values is not None:
            raise NobodyWaitsError

    with pytest.raises(NobodyWaitsError), pausing(turn):
        encoder.encode([long])
    assert [rows.values is None for rows in long.rows] == [False, False, True, True]
    known = long.rows[1].values
    encoder.encode([long])
    assert long.rows[1].values is known
    assert encoder.n_encoded == n_encoded + 2
    for found, expected in zip((long, short), alone, strict=True):
        assert (found.state() == expected.state()).all()


def test_header_of_a_stream_has_no_length(hearing: cbatch.Engine) -> None:
    whole = file_of(tone(5))
    data = whole[:4] + b"\xff" * 4 + whole[8:40] + b"\xff" * 4 + whole[44:]
    asked = [chat(each, "Hm?") for each in (whole, data)]
    first, second = hearing.run(asked, options=GREEDY).results()
    assert first.token_ids == second.token_ids


@pytest.mark.parametrize(
    ("part", "words"),
    [
        ({"type": "audio", "audio": "a.wav"}, "sound of type str: give a pathlib.Path"),
        ({"type": "audio", "audio": b""}, "empty sound"),
        ({"type": "audio", "audio": np.zeros((2, 5), np.float32)}, r"shape \(2, 5\)"),
        ({"type": "audio", "audio": np.zeros(5, np.int16)}, "of int16, which is not a sound"),
        ({"type": "input_audio"}, "sound without data"),
        ({"type": "input_audio", "input_audio": {"data": "AAAA", "format": "aac"}}, "format 'aac'"),
        ({"type": "input_audio", "input_audio": {"data": "AAAA", "format": 3}}, "format 3"),
    ],
)
def test_wrong_part_is_refused_at_once(
    hearing: cbatch.Engine, part: dict[str, Any], words: str
) -> None:
    content = [part, {"type": "text", "text": "Hm?"}]
    with pytest.raises(ConfigError, match=words):
        hearing.run([[{"role": "user", "content": content}]])


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"data": "%%%", "format": "wav"}, "base64"),
        ({"data": "AAA=", "format": "f32"}, "2 bytes, which are not a whole number"),
    ],
)
def test_data_that_is_no_sound_fails_its_own_request(
    hearing: cbatch.Engine, given: dict[str, Any], words: str
) -> None:
    content = [{"type": "input_audio", "input_audio": given}, {"type": "text", "text": "Hm?"}]
    asked = [{"role": "user", "content": content}]
    [result] = hearing.run([asked], options=GREEDY).results(return_errors=True)
    assert isinstance(result.error, PromptError)
    assert words in str(result.error)


def test_fuzzed_files_neither_crash_nor_hang(hearing: cbatch.Engine) -> None:
    for ended in fuzz(hearing, SOUNDS, 30, seed=9):
        assert not ended.keys() - {"answer", "PromptError"}


def test_projector_takes_only_what_it_encodes(
    hearing: cbatch.Engine, showing_model: Path, tmp_path: Path
) -> None:
    picture = [{"type": "image", "image": b"x"}, {"type": "text", "text": "Hm?"}]
    with pytest.raises(ConfigError, match="no encoder of pictures"):
        hearing.run([[{"role": "user", "content": picture}]])
    eyes = write_projector(tmp_path / "p.gguf", 64)
    with cbatch.load(showing_model, mmproj=eyes, parallel=1, ctx_per_seq=64) as engine:
        with pytest.raises(ConfigError, match="no encoder of sound"):
            engine.run([chat(tone(0), "Hm?")])
        assert (engine.model_facts.can_see, engine.model_facts.can_hear) == (True, False)
    facts = hearing.model_facts
    assert (facts.can_see, facts.can_hear, facts.audio_rate) == (False, True, RATE)


def test_closing_does_not_wait_for_an_encoding(
    showing_model: Path, projector: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = cbatch.load(showing_model, mmproj=projector, parallel=1, ctx_per_seq=1024)
    encoder, begun = parts_of(engine).backend.projector, threading.Event()
    encode = encoder.encode

    def encode_and_tell(pictures: Any) -> None:
        begun.set()
        encode(pictures)

    monkeypatch.setattr(encoder, "encode", encode_and_tell)
    response = engine.run([chat(tone(0, 300), "Hm?")], options=GREEDY)  # ten parts
    assert begun.wait(PATIENCE_S)
    engine.close()
    assert encoder.n_encoded == 0
    [result] = response.results(return_errors=True)
    assert result.error is not None
