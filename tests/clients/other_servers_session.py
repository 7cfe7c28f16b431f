"""A scripted session: clients of other servers, unmodified, against running servers.

    other_servers_session.py URL [--keyed URL --key KEY] [--encoder URL] [--reranker URL]

The clients are the official ones of Ollama, of text-generation-inference and of Cohere, and huggingface_hub's
InferenceClient.
URL is a server's address without a path. The keyed server requires KEY, and accepts any model name; `llama3` is one
of its own. The encoder serves a model of embeddings, the reranker a classifier with one label. Prints one line per check: "ok NAME", "FAILED NAME: why" or
"skipped NAME: why". The exit status is 1 if a check failed.

The checks are valid for any model with a chat template: they compare shapes, and answers that must be equal.
"""

import argparse
import json
import sys
import urllib.error
import urllib.request
from importlib.metadata import version

import cohere
import cohere.errors
import ollama
import text_generation
import text_generation.errors
from huggingface_hub import InferenceClient
from huggingface_hub.errors import ValidationError

from runner import check, run_checks

STORY = "Once upon a time, there was a"
CHAT = [{"role": "user", "content": "Hello! Who are you?"}]
# Timeout of every wait.
PATIENCE_S = 120
GREEDY = {"temperature": 0, "num_predict": 16}


class Server:
    """A running server and the clients for it."""

    def __init__(self, url, key=None):
        self.url = url.rstrip("/")
        self.headers = {"Authorization": f"Bearer {key}"} if key else {}
        self.ollama = ollama.Client(self.url, headers=self.headers, timeout=PATIENCE_S)
        self.tgi = text_generation.Client(self.url, headers=self.headers, timeout=PATIENCE_S)
        self.hub = InferenceClient(self.url, token=key, timeout=PATIENCE_S)
        self.model = json.loads(self.get("/v1/models"))["data"][0]["id"]

    def get(self, path):
        request = urllib.request.Request(self.url + path, headers=self.headers)
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as page:
            return page.read()

    def post(self, path, body):
        headers = {**self.headers, "Content-Type": "application/json"}
        request = urllib.request.Request(self.url + path, json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as page:
            return page.read().decode()


def equal(got, wanted, what):
    assert got == wanted, f"{what}: {got!r} instead of {wanted!r}"


def refused(kind, call):
    """Calls `call` and returns the error that it raises, which must be of this kind."""
    try:
        call()
    except kind as error:
        return error
    raise AssertionError(f"no {kind.__name__} was raised")


@check("plain")
def ollama_lists_and_shows_the_model(server):
    equal([model.model for model in server.ollama.list().models], [server.model], "the list")
    equal([model.model for model in server.ollama.ps().models], [server.model], "what is loaded")
    shown = server.ollama.show(server.model)
    assert "completion" in shown.capabilities and shown.template, f"{shown}"


@check("plain")
def ollama_generates(server):
    for more in ({}, {"raw": True}, {"system": "Be brief."}):
        whole = server.ollama.generate(server.model, STORY, options=GREEDY, **more)
        equal((whole.done, whole.eval_count <= 16), (True, True), "the end")
        assert whole.done_reason in ("stop", "length") and whole.total_duration > 0 and whole.eval_duration >= 0
        parts = list(server.ollama.generate(server.model, STORY, options=GREEDY, stream=True, **more))
        equal("".join(part.response for part in parts), whole.response, "the streamed text")
        equal([part.done for part in parts], [False] * (len(parts) - 1) + [True], "what is done")
        equal(parts[-1].eval_count, whole.eval_count, "the tokens")
    scored = server.ollama.generate(server.model, STORY, options=GREEDY, raw=True, logprobs=True, top_logprobs=2)
    equal("".join(entry.token for entry in scored.logprobs).strip(), scored.response.strip(), "the tokens' text")
    equal(server.ollama.generate(server.model).done_reason, "load", "a request without a prompt")


@check("plain")
def ollama_chats(server):
    whole = server.ollama.chat(server.model, CHAT, options=GREEDY)
    equal((whole.message.role, whole.done), ("assistant", True), "the end")
    parts = list(server.ollama.chat(server.model, CHAT, options=GREEDY, stream=True))
    equal("".join(part.message.content for part in parts), whole.message.content, "the streamed text")
    equal(parts[-1].done_reason, whole.done_reason, "the reason")
    schema = {"type": "object", "properties": {"age": {"type": "integer", "maximum": 9}}, "required": ["age"]}
    schema["additionalProperties"] = False
    formed = server.ollama.chat(server.model, CHAT, format=schema, options={**GREEDY, "num_predict": 60})
    equal(list(json.loads(formed.message.content)), ["age"], "the fields of the answer")


def weather(city: str) -> str:
    """Returns the weather.

    Args:
        city: The city.
    """
    return f"sunny in {city}"


@check("plain")
def ollama_takes_tools(server):
    answer = server.ollama.chat(server.model, CHAT, tools=[weather], options=GREEDY)
    assert answer.message.content is not None or answer.message.tool_calls, f"{answer}"
    call = {"function": {"name": "weather", "arguments": {"city": "Rome"}}}
    messages = CHAT + [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "sunny", "tool_name": "weather"},
    ]
    assert server.ollama.chat(server.model, messages, tools=[weather], options=GREEDY).done


@check("plain")
def ollama_raises_errors(server):
    error = refused(ollama.ResponseError, lambda: server.ollama.chat("no-such-model", CHAT))
    equal(error.status_code, 404, "an unknown model")
    assert "no-such-model" in error.error, f"{error.error!r}"
    wrong = {"num_predict": -7}
    stream = lambda: list(server.ollama.generate(server.model, STORY, options=wrong, stream=True))
    error = refused(ollama.ResponseError, stream)
    assert error.status_code == 400 and "num_predict" in error.error, f"{error.error!r}"


@check("keyed")
def names_and_keys_are_those_of_the_server(server):
    names = [model.model for model in server.ollama.list().models]
    equal(names, [server.model, "llama3", "gpt-4o"], "the names")
    for name in ("llama3", "llama3:latest", "any-other"):
        assert server.ollama.chat(name, CHAT, options=GREEDY).done
    error = refused(ollama.ResponseError, lambda: ollama.Client(server.url).chat("llama3", CHAT))
    equal(error.status_code, 401, "a request without a key")


@check("encoder")
def ollama_embeds(server):
    vectors = server.ollama.embed(server.model, ["Hello", "world"]).embeddings
    lengths = [sum(number * number for number in vector) for vector in vectors]
    assert len(vectors) == 2 and all(abs(length - 1) < 1e-4 for length in lengths), f"{lengths}"
    one = server.ollama.embed(server.model, "Hello").embeddings
    near = max(abs(a - b) for a, b in zip(one[0], vectors[0]))
    assert near < 1e-5, f"the same text has another vector: {near}"
    equal(len(server.ollama.embeddings(server.model, "Hello").embedding), len(one[0]), "the old path")


@check("plain")
def text_generation_generates(server):
    whole = server.tgi.generate(STORY, max_new_tokens=12, decoder_input_details=True, top_n_tokens=2)
    details = whole.details
    equal("".join(token.text for token in details.tokens if not token.special), whole.generated_text, "the tokens")
    equal([len(top) >= 1 for top in details.top_tokens], [True] * len(details.tokens), "the likeliest tokens")
    assert details.generated_tokens <= 12 and details.prefill and details.prefill[0].logprob is None
    parts = list(server.tgi.generate_stream(STORY, max_new_tokens=12, top_n_tokens=2))
    equal("".join(part.token.text for part in parts if not part.token.special), whole.generated_text, "the stream")
    equal(parts[-1].generated_text, whole.generated_text, "the text at its end")
    equal(parts[-1].details.generated_tokens, len(parts), "the number of tokens")
    equal([part.generated_text for part in parts[:-1]], [None] * (len(parts) - 1), "the texts before")
    full = server.tgi.generate(STORY, max_new_tokens=12, return_full_text=True)
    equal(full.generated_text, STORY + whole.generated_text, "the whole text")
    best = server.tgi.generate(STORY, max_new_tokens=4, do_sample=True, best_of=3)
    equal(len(best.details.best_of_sequences), 2, "the other sequences")
    same = [server.tgi.generate(STORY, max_new_tokens=8, do_sample=True, seed=7).generated_text for _ in "ab"]
    equal(same[0], same[1], "the same seed")


@check("plain")
def text_generation_raises_errors(server):
    long = lambda: server.tgi.generate(STORY, max_new_tokens=10**6)
    message = str(refused(text_generation.errors.ValidationError, long))
    assert "max_new_tokens" in message, f"{message!r}"
    mark = lambda: list(server.tgi.generate_stream(STORY, watermark=True))
    refused(text_generation.errors.ValidationError, mark)


@check("plain")
def the_hubs_client_generates_text(server):
    wish = {"max_new_tokens": 12}
    whole = server.hub.text_generation(STORY, **wish)
    equal("".join(server.hub.text_generation(STORY, stream=True, **wish)), whole, "the stream")
    details = server.hub.text_generation(STORY, details=True, **wish)
    equal((details.generated_text, len(details.details.tokens) <= 12), (whole, True), "with details")
    parts = list(server.hub.text_generation(STORY, details=True, stream=True, **wish))
    equal((parts[-1].generated_text, parts[-1].details.input_length > 0), (whole, True), "the end of the stream")
    grammar = {"type": "regex", "value": "[0-9]{3}"}
    formed = server.hub.text_generation(STORY, grammar=grammar, **wish)
    assert len(formed) == 3 and formed.isdigit(), f"{formed!r}"
    refused(ValidationError, lambda: server.hub.text_generation(STORY, truncate=-1))
    endpoint = InferenceClient(server.url, provider="hf-inference", timeout=PATIENCE_S)
    equal(endpoint.get_endpoint_info()["model_id"], server.model, "what the server says")
    assert endpoint.health_check(), "the server is healthy"


@check("plain")
def the_hubs_client_chats(server):
    hub = InferenceClient(base_url=server.url, timeout=PATIENCE_S)
    wish = {"model": server.model, "messages": CHAT, "max_tokens": 12, "temperature": 0}
    whole = hub.chat_completion(**wish)
    parts = list(hub.chat_completion(stream=True, **wish))
    text = "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
    equal(text, whole.choices[0].message.content, "the stream")


@check("keyed")
def the_hubs_client_chats_without_a_name(server):
    assert server.hub.chat_completion(CHAT, max_tokens=4).choices[0].message.content is not None


@check("plain")
def llama_servers_paths_answer(server):
    body = {"prompt": STORY, "n_predict": 12, "temperature": 0, "n_probs": 2}
    whole = json.loads(server.post("/completion", body))
    equal((whole["stop"], whole["tokens_predicted"]), (True, len(whole["completion_probabilities"])), "the end")
    events = server.post("/completion", {**body, "stream": True}).strip().split("\n\n")
    parts = [json.loads(event.removeprefix("data: ")) for event in events]
    equal("".join(part["content"] for part in parts), whole["content"], "the stream")
    equal(len(json.loads(server.get("/slots"))), json.loads(server.get("/props"))["total_slots"], "the slots")


@check("plain")
def inferflows_api_answers(server):
    body = {"text": "Hello!", "max_output_len": 12, "decoding_alg": "greedy", "is_streaming_mode": 0}
    whole = json.loads(server.post("/", body))
    equal(whole["ret_code"], "succ", "the code")
    objects = server.post("/", {**body, "is_streaming_mode": 1}).strip().split("\n\n")
    parts = [json.loads(text) for text in objects]
    equal("".join(part["text"] for part in parts), whole["text"], "the stream")
    equal(parts[-1]["is_end"], 1, "the end")
    error = refused(urllib.error.HTTPError, lambda: server.post("/", {"text": ""}))
    equal((error.code, json.loads(error.read())["ret_code"]), (400, "error.empty_request"), "an empty request")


@check("reranker")
def coheres_clients_rerank(server):
    documents = ["Once upon a time, there was a king.", "The weather is sunny in Rome.", "A king"]
    wish = {"model": server.model, "query": "Who was the king?", "documents": documents}
    for client in (cohere.ClientV2, cohere.Client):
        client = client("any key", base_url=server.url, timeout=PATIENCE_S)
        results = client.rerank(**wish).results
        equal(sorted(result.index for result in results), [0, 1, 2], "the documents")
        scores = [result.relevance_score for result in results]
        equal(scores, sorted(scores, reverse=True), "the order")
        best = client.rerank(**wish, top_n=1).results
        equal([(result.index, result.relevance_score) for result in best], [(results[0].index, scores[0])], "the best")
        error = refused(cohere.errors.BadRequestError, lambda: client.rerank(**{**wish, "documents": []}))
        assert "documents" in str(error.body), f"{error.body}"
    client = cohere.ClientV2("any key", base_url=server.url, timeout=PATIENCE_S)
    wish["documents"] = ["king", "king of Rome"]
    for most, scores in [(1, 1), (9, 2)]:
        results = client.rerank(**wish, max_tokens_per_doc=most).results
        equal(len({result.relevance_score for result in results}), scores, f"scores of documents of {most} tokens")


def main():
    parser = argparse.ArgumentParser(description="A scripted session with clients of other servers.")
    parser.add_argument("plain")
    parser.add_argument("--keyed")
    parser.add_argument("--key")
    parser.add_argument("--encoder")
    parser.add_argument("--reranker")
    parser.add_argument("--only", default="", help="run only checks whose name contains this text")
    args = parser.parse_args()
    servers = {
        "plain": Server(args.plain),
        "keyed": args.keyed and Server(args.keyed, args.key),
        "encoder": args.encoder and Server(args.encoder),
        "reranker": args.reranker and Server(args.reranker),
    }
    passed = run_checks(servers, args.only)
    if passed and not args.only:
        print(f"client ollama {version('ollama')}: chat, generate, streams, tools, embed, list, show", flush=True)
        print(f"client text-generation {version('text-generation')}: generate, generate_stream", flush=True)
        print(f"client huggingface_hub's InferenceClient {version('huggingface_hub')}: text_generation, streams, chat_completion", flush=True)
        print(f"client cohere {version('cohere')}: rerank, by its clients of both versions", flush=True)
    sys.exit(not passed)


if __name__ == "__main__":
    main()
