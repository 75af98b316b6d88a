"""A web service with a warm model on each of several devices; a request is answered by the first that is free.

pip install fastapi uvicorn
ANYACCEL_MACHINE=sim:H100:2 uvicorn --app-dir examples fastapi_service:app
curl 'http://127.0.0.1:8000/score?x=21'
"""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyaccel
from fastapi import FastAPI, HTTPException

MODELS = int(os.environ.get("MODELS", "2"))


class Model:
    """Lives in a process that holds one device and sees no other. Load weights in ``__init__``."""

    def __init__(self) -> None:
        self.device = anyaccel.current().devices[0].id

    def score(self, x: float) -> dict[str, object]:
        return {"score": 2 * x, "device": self.device, "process": os.getpid()}


class Models:
    """The models that are loaded and free; a request that finds none waits."""

    def __init__(self, pool: anyaccel.Pool) -> None:
        self._pool = pool
        self._free: asyncio.Queue[anyaccel.Actor] = asyncio.Queue()
        self._loading: set[asyncio.Task[None]] = set()

    def add(self) -> None:
        """Load one more as soon as a device is free, which may be later than the service starts."""
        task = asyncio.create_task(self._load())
        self._loading.add(task)
        task.add_done_callback(self._loading.discard)

    async def _load(self) -> None:
        model = self._pool.actor(Model)
        await asyncio.wrap_future(model.score(0))  # the first call makes it warm
        self._free.put_nowait(model)

    async def score(self, x: float) -> dict[str, object]:
        model = await self._free.get()
        try:
            answer = await asyncio.wrap_future(model.score(x))
        except anyaccel.BrokenWorkerError:  # its process is gone, and the device free for another one
            self.add()
            raise
        except BaseException:
            self._free.put_nowait(model)
            raise
        self._free.put_nowait(model)
        return answer


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    with anyaccel.Pool("GPU:1", timeout=30) as pool:
        app.state.models = Models(pool)
        for _ in range(MODELS):
            app.state.models.add()
        yield
        pool.shutdown(cancel_futures=True)  # those that still wait for a device


app = FastAPI(lifespan=lifespan)


@app.get("/score")
async def score(x: float) -> dict[str, object]:
    try:
        return await app.state.models.score(x)
    except anyaccel.WorkerError as error:
        raise HTTPException(503, f"the model gave no answer: {error}") from error
