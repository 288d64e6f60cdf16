"""A dummy OpenAI-streaming server for measuring load generators: answers at once, with a fixed gap between tokens.

Started by `replay_accuracy.py` as a process of its own (sharing the replayer's process would measure itself). Speaks just
enough of the protocol: model list, streamed completions with usage in every chunk. Prints its port when it listens.
"""

from __future__ import annotations

import asyncio
import json
import sys

GAP_S = 0.02


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """One connection, one request."""
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        path = head.split(" ", 2)[1]
        length = next(
            (int(line[15:]) for line in head.split("\r\n") if line.lower().startswith("content-length:")), 0
        )
        body = json.loads(await reader.readexactly(length)) if length else {}
        if path == "/v1/completions":
            await stream(writer, len(body["prompt"]), body["max_tokens"])
        elif path == "/v1/models":
            document = json.dumps(
                {"object": "list", "data": [{"id": "dummy", "max_model_len": 1 << 20}]}
            ).encode()
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(document), document))
        else:
            writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
        await writer.drain()
    except (ConnectionError, asyncio.IncompleteReadError):
        return  # the client went away
    finally:
        writer.close()


async def stream(writer: asyncio.StreamWriter, prompt_tokens: int, count: int) -> None:
    """`count` tokens, one a chunk."""
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
    for number in range(1, count + 1):
        if number > 1:
            await asyncio.sleep(GAP_S)
        usage = {"prompt_tokens": prompt_tokens, "completion_tokens": number}
        reason = "length" if number == count else None
        send(writer, json.dumps({"choices": [{"text": " x", "finish_reason": reason}], "usage": usage}))
        await writer.drain()
    send(writer, "[DONE]")
    writer.write(b"0\r\n\r\n")


def send(writer: asyncio.StreamWriter, data: str) -> None:
    """One server-sent event as one HTTP chunk."""
    event = f"data: {data}\n\n".encode()
    writer.write(b"%x\r\n%s\r\n" % (len(event), event))


async def main() -> None:
    """Serve on an ephemeral loopback port until the parent closes our standard input."""
    server = await asyncio.start_server(answer, "127.0.0.1", 0, backlog=1024)
    print(server.sockets[0].getsockname()[1], flush=True)
    gone = asyncio.Event()
    asyncio.get_running_loop().add_reader(sys.stdin.fileno(), gone.set)
    await gone.wait()


if __name__ == "__main__":
    asyncio.run(main())
