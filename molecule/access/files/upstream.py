"""Stands for the engine: answers every route, streams on /v1/stream."""

import http.server
import json
import time


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments):
        pass

    def do_GET(self):
        if self.path == "/v1/stream":
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            for number in range(3):
                event = f"data: {number}\n\n".encode()
                self.wfile.write(f"{len(event):x}\r\n".encode() + event + b"\r\n")
                self.wfile.flush()
                time.sleep(1)
            self.wfile.write(b"0\r\n\r\n")
        else:
            self.answer({"path": self.path})

    def do_POST(self):
        length = int(self.headers.get("Content-Length", 0))
        left = length
        while left:
            left -= len(self.rfile.read(min(1 << 20, left)))
        self.answer({"path": self.path, "bytes": length})

    def answer(self, document):
        body = json.dumps(document).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


http.server.ThreadingHTTPServer(("127.0.0.1", 8000), Handler).serve_forever()
