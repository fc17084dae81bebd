"""The pictures of requests in a server: links and files are read, pixels decoded, beside the event loop.

What waits is bounded, in requests and in bytes: a picture that finds too many before it is refused as busy, so that a
flood of pictures never holds up requests without any. A client that leaves takes its pictures out of the queue.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

from paceline.errors import InvalidImage, MediaFetchFailed, MediaNotAllowed, NeverFits, UnsupportedModality
from paceline.llm.prompts import ChatPrompts, PreparedRequest
from paceline.models.media.headers import MAX_BYTES
from paceline.models.media.sources import Picture, take_pictures
from paceline.process.client import EngineInfo
from paceline.server.api.openai_requests import ParsedBody
from paceline.server.batches.batch_records import StoredFile, UnknownFile
from paceline.server.call import Call
from paceline.server.errors import TooBusy
from paceline.server.http.fetch_url import Fetcher

NUM_THREADS = 2
MOST_WAITING = 64  # requests whose pictures are not decoded yet
MOST_FETCHES = 32  # under way
MOST_OF_REQUEST = 8  # of these
MOST_BYTES = 2**30  # of links and files that were read for requests and are not decoded yet

FindFile = Callable[[str, str], Awaitable[tuple[StoredFile, Path]]]  # of a tenant, by its id


class MediaSources:
    """Where pictures are read from that a request only names."""

    def __init__(self, domains: Sequence[str] = ()) -> None:
        """`domains`: hosts from which links are fetched."""
        self.find_file: FindFile | None = None  # of /v1/files; None: this server has none
        self.fetcher = Fetcher(domains) if domains else None
        self.num_bytes = 0  # of pictures at hand
        self._num_fetches = 0

    @asynccontextmanager
    async def at_hand(self, call: Call, body: ParsedBody, most: int) -> AsyncIterator[ParsedBody]:
        """Within the block, the body with its pictures, of which those that are links or files have been read.

        `most`: how many it may have. Raises InvalidRequest that names the picture's place; TooBusy where too much is
        at hand already.
        """
        messages, pictures = take_pictures(body.messages or (), most=most)
        named = [picture for picture in pictures if picture.data is None]
        try:
            await self._read(named, call)
            yield replace(body, messages=messages)
        finally:
            self.num_bytes -= sum(len(picture.data or b"") for picture in named)

    async def _read(self, pictures: Sequence[Picture], call: Call) -> None:
        """Some links are followed side by side, so that a request with many is not refused for its own."""
        own = asyncio.Semaphore(MOST_OF_REQUEST)
        try:
            async with asyncio.TaskGroup() as group:
                for picture in pictures:
                    if picture.url:
                        group.create_task(self._fetch(picture, own))
                    elif picture.file_id:
                        group.create_task(self._read_file(picture, call))
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def _fetch(self, picture: Picture, own: asyncio.Semaphore) -> None:
        if self.fetcher is None:
            hint = "send the picture as data:image/TYPE;base64,..."
            message = f"{picture.place}: this server fetches no links; {hint}"
            raise MediaNotAllowed(message, param="messages")
        async with own:
            if self._num_fetches >= MOST_FETCHES:
                raise TooBusy("too many pictures are being fetched; try again later")
            self._num_fetches += 1
            try:
                self._hold(picture, await self.fetcher.fetch(picture.url))
            except (MediaNotAllowed, MediaFetchFailed) as error:
                raise type(error)(f"{picture.place}: {error}", param="messages") from None
            finally:
                self._num_fetches -= 1

    async def _read_file(self, picture: Picture, call: Call) -> None:
        if self.find_file is None:
            message = f"{picture.place}: this server keeps no files; it needs --batch-dir FOLDER"
            raise UnsupportedModality(message, param="messages")
        file, path = await self.find_file(call.caller.tenant, picture.file_id)
        if file.bytes > MAX_BYTES:
            message = f"{picture.place}: the picture has {file.bytes} bytes; at most {MAX_BYTES} are accepted"
            raise InvalidImage(message, param="messages")
        self._check_room(file.bytes)
        try:
            self._hold(picture, await asyncio.to_thread(path.read_bytes))
        except FileNotFoundError:  # deleted meanwhile
            raise UnknownFile from None

    def _check_room(self, num_more: int) -> None:
        if self.num_bytes + num_more > MOST_BYTES:
            raise TooBusy("too many bytes of pictures wait to be decoded; try again later")

    def _hold(self, picture: Picture, data: bytes) -> None:
        self._check_room(len(data))
        self.num_bytes += len(data)
        picture.data, picture.url, picture.file_id = data, "", ""


class MediaWork:
    """Decodes and resizes."""

    def __init__(self, chat: ChatPrompts) -> None:
        self._chat = chat
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="paceline-media")
        self._num_waiting = 0

    async def decoded(self, request: PreparedRequest, tenant: str, info: EngineInfo) -> PreparedRequest:
        """Raises InvalidImage; NeverFits for an item of more vectors than the engine has room for; TooBusy where too
        many wait."""
        most = info.picture_vectors
        for picture in request.pictures:
            if picture.opened.size.item_outputs > most > 0:
                place, size = picture.opened.picture.place, picture.opened.size.item_outputs
                message = (
                    f"{place}: the picture has {size} tokens, and there is room for the vectors of {most}"
                )
                raise NeverFits(message, param="messages")
        if self._num_waiting >= MOST_WAITING:
            raise TooBusy("too many pictures are being decoded; try again later")
        loop = asyncio.get_running_loop()
        self._num_waiting += 1
        try:
            return await loop.run_in_executor(self._threads, self._chat.decoded, request, tenant)
        finally:
            self._num_waiting -= 1

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
