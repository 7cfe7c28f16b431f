"""A scripted session: the OpenAPI document of a running server, and what the server does with requests made of it.

    openapi_session.py URL [--seconds S]

URL is a server's address without a path; it serves the model that is built in, with a folder for files and batches. The
document is checked by openapi-spec-validator; then schemathesis makes requests of it, valid and not, for S seconds.
Prints one line per check: "ok NAME" or "FAILED NAME: why".
"""

import argparse
import json
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from pathlib import Path

from runner import run, title

# The server may refuse what a schema permits, and accept more than it says.
CHECKS = [
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
    "allow_header_conformance",
]

# A value of each type, to see whether a field is known.
VALUES = {"string": "x", "integer": 1, "number": 0.5, "boolean": True, "array": [], "object": {}}

# Requests of this many tokens are answered at once.
MAX_TOKENS = 4


def call(url, body=None):
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status, response.headers, response.read()
    except urllib.error.HTTPError as error:
        return error.code, error.headers, error.read()


def properties(document, schema):
    """Returns the fields of a schema, with those of the schemas that it consists of."""
    if "$ref" in schema:
        schema = document["components"]["schemas"][schema["$ref"].rsplit("/", 1)[1]]
    found = dict(schema.get("properties", {}))
    for part in schema.get("allOf", []):
        found.update(properties(document, part))
    return found


def the_document_is_valid(options, document):
    from openapi_spec_validator import OpenAPIV31SpecValidator

    assert document["openapi"].startswith("3.1"), document["openapi"]
    errors = [f"{list(error.absolute_path)}: {error.message}" for error in OpenAPIV31SpecValidator(document).iter_errors()]
    assert not errors, errors[:3]


def the_server_knows_every_field_that_is_described(options, document):
    needed = {
        "/v1/completions": {"prompt": "a", "max_tokens": 1},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1},
        "/v1/tokenize": {},
        "/v1/detokenize": {"tokens": [1]},
    }
    unknown, tried = [], 0
    for path, body in needed.items():
        schema = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        for name, described in properties(document, schema).items():
            kinds = described.get("type", "string")
            kind = kinds if isinstance(kinds, str) else kinds[0]
            base = body
            if path == "/v1/tokenize" and name not in ["prompt", "messages"]:
                # Of a text and messages, one is given.
                is_chat = name == "add_generation_prompt"
                base = {"messages": needed["/v1/chat/completions"]["messages"]} if is_chat else {"prompt": "a"}
            status, headers, text = call(options.url + path, {name: VALUES[kind], **base})
            tried += 1
            if status >= 500 or name in headers.get("x-mainstem-ignored", ""):
                unknown.append((path, name, status, text[:100]))
    assert not unknown and tried > 50, (tried, unknown)


def requests_made_of_the_document_are_answered_as_it_says(options, document):
    # An answer of as many tokens as the context permits would take the time of a thousand others.
    for schema in document["components"]["schemas"].values():
        for part in [schema, *schema.get("allOf", [])]:
            for name in {"max_tokens", "max_completion_tokens"} & set(part.get("properties", {})):
                part["properties"][name] = {"type": "integer", "minimum": 1, "maximum": MAX_TOKENS}
                if name == "max_tokens":
                    part["required"] = [*part.get("required", []), name]
    for name, most in [("n", 4), ("best_of", 4)]:
        document["components"]["schemas"]["GenerationFields"]["properties"][name] = {
            "type": "integer", "minimum": 1, "maximum": most,
        }
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "openapi.json")
        file.write_text(json.dumps(document))
        # The stream of sequences in flight never ends.
        command = [
            sys.executable, "-m", "schemathesis.cli", "run", str(file), "--url", options.url,
            "--exclude-path", "/v1/inflight", "--checks", ",".join(CHECKS), "--phases", "examples,coverage,fuzzing",
            "--max-examples", "20", "--max-time", str(options.seconds), "--workers", "1", "--seed", "1", "--no-shrink",
            "--request-timeout", "30", "--suppress-health-check", "all", "--warnings", "off", "--no-color",
        ]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=options.seconds + 120)
    assert done.returncode == 0, (done.stdout + done.stderr)[-2500:]
    assert call(options.url + "/health")[0] == 200


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("--seconds", type=int, default=25)
    options = parser.parse_args()
    options.url = options.url.rstrip("/")
    document = json.loads(call(options.url + "/openapi.json")[2])
    checks = [
        the_document_is_valid,
        the_server_knows_every_field_that_is_described,
        requests_made_of_the_document_are_answered_as_it_says,
    ]
    results = [run(f"openapi: {title(check)}", check, options, document) for check in checks]
    sys.exit(not all(results))


if __name__ == "__main__":
    main()
