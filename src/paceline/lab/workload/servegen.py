"""ServeGen folders: clients of a production service, as rates by window and histograms, in; a Workload out.

A client is two files, as a folder or a tar archive holds them: `chunk-N-trace.csv` says for each window of the day how
often it asks and by which gaps (gamma or Weibull), `chunk-N-dataset.json` has histograms of its lengths. Three kinds of
clients are known: language, reasoning and pictures. Owns reading them and drawing from them; the first n requests do
not depend on how many are asked for. Lengths are drawn independently of each other, because the files tie them by
client and window alone.
"""

from __future__ import annotations

import json
import re
import tarfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from paceline.errors import InputError
from paceline.lab.workload.workload import Floats, Images, Workload

PREFIX = "servegen:"
DEFAULT_REQUESTS = 10_000
MAX_FILE_BYTES = 64 << 20
MAX_LENGTH = 2**31 - 1
MOST_IMAGES = 10_000  # of one request; a histogram beyond that is not one of pictures
_NAME = re.compile(r"chunk-(\d{1,9})-(trace\.csv|dataset\.json)")
_GAPS = {"Gamma": "standard_gamma", "Weibull": "weibull"}
_UNKNOWN = ("audio", "video")  # kinds of parts that no model here takes

Files = dict[int, dict[str, tuple[str, bytes]]]  # by client and ending: where it is, what it holds


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueCounts:
    """Values and how likely each is, or less."""

    values: NDArray[np.int64]
    up_to: Floats  # cumulative, to 1

    def draw(self, random: np.random.Generator, count: int) -> NDArray[np.int64]:
        drawn: NDArray[np.int64] = self.values[np.searchsorted(self.up_to, random.random(count), "right")]
        return drawn


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientWindow:
    """How often a client asks in one window."""

    start_s: float
    rate: float  # requests per second
    gaps: str  # method of a random generator
    shape: float


@dataclass(slots=True)
class Client:
    """One client of the service."""

    number: int
    windows: tuple[ClientWindow, ...]
    place: str  # of its histograms
    fields: Mapping[float, Mapping[str, str]]  # histograms as text, by the second from which they hold
    known: dict[tuple[float, str], ValueCounts] = field(default_factory=dict)

    def histogram(self, start_s: float, name: str) -> ValueCounts:
        """The one that holds at a moment; else the nearest that is there."""
        starts = [at for at, fields in self.fields.items() if _has(fields, name)]
        if not starts:
            raise InputError(f"{self.place}: has no '{name}', but its client asks for something")
        earlier = [at for at in starts if at <= start_s]
        at = max(earlier) if earlier else min(starts)
        if (at, name) not in self.known:
            self.known[at, name] = _histogram(self.fields[at][name], f"{self.place}, {at:g}, '{name}'")
        return self.known[at, name]

    def has(self, name: str) -> bool:
        return any(_has(fields, name) for fields in self.fields.values())


def read_servegen(path: Path, num_requests: int | None, seed: int, rate: float | None) -> Workload:
    """The first requests of the day that the clients make, at their rates or at `rate` a second in every window."""
    clients = _clients(path)
    count = DEFAULT_REQUESTS if num_requests is None else num_requests
    parts: list[_DrawnRequest] = []
    found = 0
    for number, (start_s, end_s, factor) in enumerate(_windows(clients, rate)):
        drawn = _DrawnRequest.together(
            _draw(client, number, end_s - start_s, factor, seed, kind)
            for kind, client in enumerate(clients)
            if client.windows[number].rate > 0.0
        )
        parts.append(drawn.sorted())
        found += len(drawn.arrival_s)
        if found >= count:
            break
    if num_requests is not None and found < count:
        raise InputError(f"{path}: makes {found} requests in a day, {count} were asked for; ask for fewer")
    if not found:
        raise InputError(f"{path}: none of its clients asks for anything")
    everything = _DrawnRequest.together(parts)
    return everything.workload(_title(path), tuple(str(client.number) for client in clients)).head(count)


def _title(path: Path) -> str:
    return path.name.removesuffix(".gz").removesuffix(".tar").removesuffix(".tgz")


def _windows(clients: list[Client], rate: float | None) -> Iterator[tuple[float, float, float]]:
    """Where each window begins and ends, and the factor of the rates in it."""
    starts = [window.start_s for window in clients[0].windows]
    ends = [*starts[1:], starts[-1] + (starts[-1] - starts[-2] if len(starts) > 1 else 600.0)]
    for number, (start_s, end_s) in enumerate(zip(starts, ends, strict=True)):
        total = sum(client.windows[number].rate for client in clients)
        yield start_s, end_s, 1.0 if rate is None or total <= 0.0 else rate / total


# -- drawing ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _DrawnRequest:
    """Requests as columns; their pictures stand one after another."""

    arrival_s: Floats
    client: NDArray[np.int32]
    text_len: NDArray[np.int64]
    output_len: NDArray[np.int64]
    num_images: NDArray[np.int64]
    image_tokens: NDArray[np.int64]

    @classmethod
    def together(cls, parts: Iterable[_DrawnRequest]) -> _DrawnRequest:
        listed = [*parts, _NOTHING]
        columns = {
            name: np.concatenate([getattr(part, name) for part in listed])
            for name in cls.__dataclass_fields__
        }
        return cls(**columns)

    def sorted(self) -> _DrawnRequest:
        order = np.argsort(self.arrival_s, kind="stable")
        first = np.cumsum(self.num_images) - self.num_images
        images = [np.arange(first[i], first[i] + self.num_images[i]) for i in order.tolist()]
        index = np.concatenate([*images, np.empty(0, np.int64)])
        return _DrawnRequest(
            arrival_s=self.arrival_s[order],
            client=self.client[order],
            text_len=self.text_len[order],
            output_len=self.output_len[order],
            num_images=self.num_images[order],
            image_tokens=self.image_tokens[index],
        )

    def workload(self, name: str, clients: tuple[str, ...]) -> Workload:
        first = np.concatenate([[0], np.cumsum(self.num_images)])
        tokens = np.concatenate([[0], np.cumsum(self.image_tokens)])
        prompt_len = self.text_len + tokens[first[1:]] - tokens[first[:-1]]
        if prompt_len.max(initial=0) > MAX_LENGTH:
            raise InputError(f"{name}: its pictures make a prompt of more than {MAX_LENGTH} tokens")
        has_images = bool(len(self.image_tokens))
        images = Images(
            first=first.astype(np.int64),
            tokens=self.image_tokens.astype(np.int32),
            content=np.arange(len(self.image_tokens)),  # no two of them are equal, as far as the files say
        )
        return Workload(
            name=name,
            arrival_s=np.round(self.arrival_s, 6),
            prompt_len=prompt_len.astype(np.int32),
            output_len=np.maximum(self.output_len, 1).astype(np.int32),
            tenant=self.client,
            tenants=clients,
            images=images if has_images else None,
        )


_NO_NUMBERS = np.empty(0, np.int64)
_NOTHING = _DrawnRequest(
    arrival_s=np.empty(0, np.float64),
    client=np.empty(0, np.int32),
    text_len=_NO_NUMBERS,
    output_len=_NO_NUMBERS,
    num_images=_NO_NUMBERS,
    image_tokens=_NO_NUMBERS,
)


def _draw(client: Client, number: int, span_s: float, factor: float, seed: int, tenant: int) -> _DrawnRequest:
    """What one client asks for in one window."""
    window = client.windows[number]
    random = np.random.default_rng([seed, client.number, number, 0x73657276])
    count = int(window.rate * factor * span_s + random.random())
    start_s = window.start_s
    has_images = client.has("image_count")
    text = client.histogram(start_s, "text_tokens" if has_images else "input_tokens")
    num_images, image_tokens = np.zeros(count, np.int64), _NO_NUMBERS
    arrival_s = start_s + _times(window, count, span_s, random)
    text_len = np.maximum(text.draw(random, count), 1)
    output_len = client.histogram(start_s, "output_tokens").draw(random, count)
    if has_images:
        num_images = client.histogram(start_s, "image_count").draw(random, count)
        if num_images.max(initial=0) > MOST_IMAGES:
            raise InputError(
                f"{client.place}: 'image_count' has more than {MOST_IMAGES} pictures in a request"
            )
        num_drawn = int(num_images.sum())
        if num_drawn:
            image_tokens = client.histogram(start_s, "image_tokens").draw(random, num_drawn)
            image_tokens = np.maximum(image_tokens, 1)
    return _DrawnRequest(
        arrival_s=arrival_s,
        client=np.full(count, tenant, np.int32),
        text_len=text_len,
        output_len=output_len,
        num_images=num_images,
        image_tokens=image_tokens,
    )


def _times(window: ClientWindow, count: int, span_s: float, random: np.random.Generator) -> Floats:
    """Moments within a window of exactly `count` requests.

    The gaps go around the window as around a circle, from a place drawn at random: so a window has the client's rate,
    and the bursts of different clients do not all begin with it.
    """
    gaps = getattr(random, window.gaps)(window.shape, count)
    turn = random.random()
    total = float(gaps.sum())
    if not 0.0 < total < np.inf:  # gaps too small for a number
        return np.sort(random.random(count)) * span_s
    places = np.mod(np.cumsum(gaps) / total + turn, 1.0)
    moments: Floats = np.sort(places) * span_s
    return moments


# -- reading ---------------------------------------------------------------------------------------------------


def _clients(path: Path) -> list[Client]:
    files = _files(path)
    if not files:
        raise InputError(
            f"{path}: holds no chunk-N-trace.csv and chunk-N-dataset.json; name a ServeGen folder"
        )
    clients = [_client(path, number, files[number]) for number in sorted(files)]
    starts = [tuple(window.start_s for window in client.windows) for client in clients]
    for client, own in zip(clients, starts, strict=True):
        if own != starts[0]:
            raise InputError(
                f"{path}: the windows of client {client.number} are not those of client {clients[0].number}"
            )
    return clients


def _files(path: Path) -> Files:
    try:
        if path.is_dir():
            return _sorted_in(path, _folder(path))
        with tarfile.open(path) as archive:
            return _sorted_in(path, _members(archive, path))
    except FileNotFoundError:
        raise InputError(f"{path}: no such folder or archive") from None
    except (tarfile.TarError, EOFError) as problem:
        raise InputError(f"{path}: is neither a folder nor a tar archive ({problem})") from None
    except OSError as problem:
        raise InputError(f"{path}: cannot be read ({problem.strerror or problem})") from None


def _folder(path: Path) -> Iterator[tuple[str, int, bytes]]:
    for file in sorted(path.rglob("chunk-*")):
        if _NAME.fullmatch(file.name) and file.is_file():
            size = file.stat().st_size
            yield str(file), size, file.read_bytes() if size <= MAX_FILE_BYTES else b""


def _members(archive: tarfile.TarFile, path: Path) -> Iterator[tuple[str, int, bytes]]:
    """Nothing is unpacked: the files are read where they are."""
    for member in archive:
        if member.isfile() and _NAME.fullmatch(Path(member.name).name):
            stream = archive.extractfile(member) if member.size <= MAX_FILE_BYTES else None
            yield f"{path}:{member.name}", member.size, b"" if stream is None else stream.read()


def _sorted_in(path: Path, found: Iterable[tuple[str, int, bytes]]) -> Files:
    files: Files = {}
    for place, size, content in found:
        match = _NAME.fullmatch(Path(place).name)
        assert match is not None
        if size > MAX_FILE_BYTES:
            raise InputError(f"{place}: has {size} bytes; a client's file has at most {MAX_FILE_BYTES}")
        client = files.setdefault(int(match[1]), {})
        if match[2] in client:
            raise InputError(
                f"{path}: has client {match[1]} twice, in {client[match[2]][0]} and {place}; name the folder of one "
                "service"
            )
        client[match[2]] = place, content
    return files


def _client(path: Path, number: int, files: Mapping[str, tuple[str, bytes]]) -> Client:
    for ending in ("trace.csv", "dataset.json"):
        if ending not in files:
            raise InputError(f"{path}: client {number} has no chunk-{number}-{ending}")
    place, content = files["dataset.json"]
    return Client(number, _rates(*files["trace.csv"]), place, _fields(place, content))


def _rates(place: str, content: bytes) -> tuple[ClientWindow, ...]:
    windows: list[ClientWindow] = []
    for line, text in enumerate(content.decode("utf-8", "replace").splitlines(), start=1):
        if not text.strip():
            continue
        cells = [cell.strip() for cell in text.split(",")]
        if len(cells) != 6:
            raise InputError(
                f"{place}:{line}: has {len(cells)} fields; second, rate, variation, gaps and their two numbers are six"
            )
        try:
            start_s, rate, shape = float(cells[0]), float(cells[1]), float(cells[4])
        except ValueError:
            raise InputError(f"{place}:{line}: holds something else than numbers: {text[:60]!r}") from None
        if not (0.0 <= rate < 1e9 and 0.0 <= start_s < 1e9):
            raise InputError(f"{place}:{line}: a rate and a second must be at least 0 and below 1e9")
        if windows and start_s <= windows[-1].start_s:
            raise InputError(f"{place}:{line}: second {cells[0]} does not come after the line before")
        if rate and (cells[3] not in _GAPS or not 0.0 < shape < 1e6):
            raise InputError(
                f"{place}:{line}: gaps must be Gamma or Weibull with a shape above 0: {text[:60]!r}"
            )
        windows.append(ClientWindow(start_s=start_s, rate=rate, gaps=_GAPS.get(cells[3], ""), shape=shape))
    if not windows:
        raise InputError(f"{place}: is empty")
    return tuple(windows)


def _fields(place: str, content: bytes) -> dict[float, dict[str, str]]:
    try:
        given = json.loads(content)
        fields = {float(second): dict(each) for second, each in given.items()}
    except (ValueError, TypeError, AttributeError, RecursionError) as problem:
        raise InputError(f"{place}: is no JSON object of seconds and histograms ({problem})") from None
    for each in fields.values():
        for name, text in each.items():
            if not isinstance(text, str):
                raise InputError(f"{place}: '{name}' is no histogram such as \"{{50: 1.0}}\"")
            if name.startswith(_UNKNOWN) and text not in ("{}", "{0: 1.0}"):
                raise InputError(f"{place}: has {name}; texts and pictures can be simulated")
    return fields


def _has(fields: Mapping[str, str], name: str) -> bool:
    return fields.get(name, "{}") != "{}"


def _histogram(text: str, place: str) -> ValueCounts:
    """`{50: 0.25, 54: 0.75}`."""
    inner = text.strip()
    try:
        if not (inner.startswith("{") and inner.endswith("}")):
            raise ValueError
        pairs = np.array(inner[1:-1].replace(":", ",").split(","), np.float64).reshape(-1, 2)
    except ValueError:
        raise InputError(f'{place}: is no histogram such as "{{50: 1.0}}": {text[:60]!r}') from None
    values, chances = pairs[:, 0], pairs[:, 1]
    if not (np.isfinite(pairs).all() and (values >= 0).all() and (values <= MAX_LENGTH).all()):
        raise InputError(f"{place}: lengths must lie between 0 and {MAX_LENGTH}")
    total = float(chances.sum())
    if not ((chances >= 0).all() and abs(total - 1.0) < 1e-3):
        raise InputError(f"{place}: its shares add up to {total:g}; they must add up to 1")
    order = np.argsort(values, kind="stable")
    up_to = np.cumsum(chances[order]) / total
    up_to[-1] = 1.0
    return ValueCounts(values=values[order].astype(np.int64), up_to=up_to)
