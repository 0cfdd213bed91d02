"""A generated token: the only proof that the served model works."""

from __future__ import annotations

import http.client
import json
import re
import urllib.error
import urllib.request
from dataclasses import dataclass


@dataclass(frozen=True)
class Completion:
    """Outcome of one request: `text` when a token came, else `fault` says what came instead."""

    text: str = ""
    fault: str = ""


def key_fault(key: str) -> str:
    """Why no client could send KEY, empty when it can: headers are Latin-1 for http.client, h11 and Starlette."""
    if key != key.strip():
        return "it begins or ends with white space, which servers cut off"
    if not key.isprintable():
        return "it has a character that does not print"
    try:
        key.encode("latin-1")
    except UnicodeEncodeError as error:
        return (
            f"{key[error.start]!r} is no Latin-1 character: vLLM compares the key with the header's bytes read as "
            "Latin-1, so it would answer 401 to everybody"
        )
    return ""


def complete(
    base_url: str,
    model: str,
    prompt: str,
    *,
    max_tokens: int,
    pattern: str = ".",
    timeout: float = 60.0,
    api_key: str = "",
) -> Completion:
    """Ask BASE_URL (http://host:port) for a greedy completion and hold its text against PATTERN (re.search).

    Never raises for what a server or a network can do; the fault names it.
    """
    body = json.dumps({"model": model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}).encode()
    headers = {"Content-Type": "application/json"}
    if api_key:
        headers["Authorization"] = f"Bearer {api_key}"
        if fault := key_fault(api_key):
            return Completion(fault=f"the API key cannot be sent: {fault}")
    request = urllib.request.Request(f"{base_url}/v1/completions", data=body, headers=headers)  # noqa: S310
    try:
        with urllib.request.urlopen(request, timeout=timeout) as response:  # noqa: S310 - the scheme is the caller's constant
            document = json.load(response)
        text = document["choices"][0]["text"]
    except urllib.error.HTTPError as error:
        return Completion(fault=f"{base_url} answered {error.code}: {error.read(300).decode('utf-8', 'replace')}")
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)
        return Completion(fault=f"{base_url} gave no completion in {timeout:.0f} s: {reason}")
    except (ValueError, KeyError, IndexError, TypeError) as error:
        return Completion(fault=f"{base_url} answered something else than a completion: {error!r}")
    if not text:
        return Completion(fault=f"{base_url} generated no token for {prompt!r}")
    if not re.search(pattern, text):
        return Completion(fault=f"{base_url} generated {text!r}, which does not match {pattern!r}")
    return Completion(text=text)
