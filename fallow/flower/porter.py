"""Flower's side of a node: fetches each message from the SuperNode, has it answered, and sends the answer. One for all methods.

The SuperNode starts no process of its own (its isolation mode `process`), and nothing that a server sends is run here: a message is data.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import httpx
from flwr.app import Error, Message
from flwr.common.constant import ErrorCode, SubStatus
from flwr.proto.runtime_pb2 import AcquireTaskRequest, SendTaskHeartbeatRequest
from flwr.supercore.constant import TaskType
from flwr.supercore.heartbeat import HeartbeatSender
from flwr.supercore.interceptors import RuntimeTokenHttpInterceptor, RuntimeVersionHttpInterceptor, SuperExecAuthHttpInterceptor
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supernode.runtime.run_clientapp import pull_task_input, push_message, push_task_output

from fallow.flower.exchange import from_records, to_records
from fallow.flower.parcel import Parcel

if TYPE_CHECKING:
    from collections.abc import Iterator

Answer = Callable[[Parcel, float], Parcel | None]  # an order, and the time (time.time) at which its answer is of no use any more
ACQUIRE = "/flwr.proto.Runtime/AcquireTask"


def answered(message: Message, answer: Answer) -> Message:
    """The reply to a message."""
    try:
        found = answer(from_records(message.content), message.metadata.created_at + message.metadata.ttl)
    except Exception as e:
        traceback.print_exc()
        return Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, type(e).__name__), reply_to=message)
    if found is None:
        return Message(Error(ErrorCode.CLIENT_APP_CRASHED, "the worker ended"), reply_to=message)
    return Message(to_records(found), reply_to=message)


class Porter:
    """Between a SuperNode, which lets in who knows its secret, and who answers."""

    def __init__(self, address: str, secret: bytes, answer: Answer):
        self.address, self.answer = address, answer
        self._door = self._client(SuperExecAuthHttpInterceptor(master_secret=secret, protected_methods={ACQUIRE}))

    def _client(self, interceptor: Any) -> RuntimeHttpClient:
        interceptors = [RuntimeVersionHttpInterceptor(component_name="fallow"), interceptor]
        return RuntimeHttpClient.from_server_address(self.address, insecure=True, root_certificates=None, interceptors=interceptors)

    def carry(self) -> bool:
        """One message there and back; False where none waits, or the SuperNode is not there."""
        try:
            task = self._door.AcquireTask(AcquireTaskRequest(supported_task_types=[TaskType.CLIENT_APP]))
            if not task.token:
                return False
            with self._task(task.token) as client:
                message, context, _, _ = pull_task_input(client)
                push_message(client, answered(message, self.answer), context)
                push_task_output(client, context, SubStatus.COMPLETED, "")
        except httpx.HTTPError as e:  # of a task that was begun: the SuperNode misses its heartbeat, and says so to the server
            if not isinstance(e, httpx.ConnectError):
                print(f"the SuperNode did not take an answer: {e}", flush=True)
            return False
        return True

    @contextmanager
    def _task(self, token: str) -> Iterator[RuntimeHttpClient]:
        """A task's own client, with a heartbeat for as long as it takes."""
        client = self._client(RuntimeTokenHttpInterceptor(token))

        def beat() -> bool:
            try:
                client.SendTaskHeartbeat(SendTaskHeartbeatRequest())
            except httpx.HTTPError:
                return False
            return True

        heart = HeartbeatSender(beat)
        heart.start()
        try:
            yield client
        finally:
            heart.stop()
            client.close()

    def close(self) -> None:
        self._door.close()
